"""Exports a checkpoint's parameters as safetensors, under their Hugging Face names.

One process does it, on any machine: no mesh, no GPU, and no more memory than a file of the result
takes.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ..errors import RunError, named
from .hf_weights import INDEX, HFNames, HFWeight, Places, safetensors
from .reader import Saved, opened

LARGEST = 5 * 10**9
"""Bytes of a file, unless a single tensor is larger."""


@dataclass(frozen=True)
class Part:
    """A tensor's part of a parameter: all of it, or one expert's."""

    name: str
    stored: HFWeight
    expert: int

    def of(self, values: Mapping[str, Tensor]) -> Tensor:
        """The part, of the parameters' whole values by name."""
        return values[self.name].tensor_split(self.stored.each[1])[self.expert]

    def is_whole(self, value: Tensor) -> bool:
        """Whether the part is whole rows, or heads, of the tensor."""
        head = self.stored.interleaved[-1] if self.stored.interleaved else 1
        return value.numel() % (prod(self.stored.rows(0)[1:]) * head) == 0


Held = dict[str, list[Part]]
"""The parameters in each tensor, one after the other."""


def export(path: Path | Saved, folder: Path, names: HFNames) -> None:
    """Writes the parameters of a checkpoint, open or not, into the new `folder`, whole or not
    at all.  RunError.
    """
    saved = opened(path)
    held = held_in(saved.parameters(), names.places, saved.path)
    put_tensors(folder, {tensor: made(parts, names.dtype, saved) for tensor, parts in held.items()})


@dataclass(frozen=True)
class Made:
    """A tensor to be written: its size in bytes, and what makes it when its file is written."""

    size: int
    value: Callable[[], Tensor]


def put_tensors(
    folder: Path, tensors: Mapping[str, Made], beside: Mapping[str, str] | None = None
) -> None:
    """Writes safetensors, and files of text `beside` them, into the new `folder`, whole or not
    at all.  RunError.
    """
    package = safetensors()
    if folder.exists():
        raise RunError(f"{folder} is there already: name a new folder")
    files = _split({tensor: each.size for tensor, each in tensors.items()})
    with draft(folder) as part:
        for file, names in files.items():
            values = {tensor: tensors[tensor].value() for tensor in names}
            try:
                with _readable(part / file) as written:
                    package.torch.save_file(values, written, metadata={"format": "pt"})
            except package.SafetensorError as error:
                raise RunError(f"cannot write {part / file}: {error}") from None
        if len(files) > 1:
            (part / INDEX).write_text(
                _index(files, sum(each.size for each in tensors.values())), "utf-8"
            )
        for name, text in (beside or {}).items():
            (part / name).write_text(text, "utf-8")


@contextmanager
def draft(folder: Path) -> Generator[Path]:
    """A folder beside `folder` that becomes it, or is removed where writing fails."""
    part = folder.with_name(f".{folder.name}.{os.urandom(4).hex()}")
    part.mkdir(parents=True)
    try:
        yield part
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part)
        raise


@contextmanager
def _readable(path: Path) -> Generator[Path]:
    """The path of a new file that others may read as any new file; safetensors writes one for
    its owner alone.
    """
    path.touch()
    mode = path.stat().st_mode
    yield path
    path.chmod(mode)


def held_in(recorded: Mapping[str, Tensor], places: Places, path: Path) -> Held:
    """RunError unless the plan's parameters are those of the checkpoint at `path`."""
    if lacking := [name for name in places if name not in recorded]:
        raise RunError(f"{path} lacks {named(lacking)}")
    if others := [name for name in recorded if name not in places]:
        raise RunError(f"{path} has {named(others)}, which the plan has not")
    held: Held = {}
    for name in sorted(recorded, key=_by_number):
        tensors, stored = places[name]
        for expert, tensor in enumerate(tensors):
            held.setdefault(tensor, []).append(Part(name, stored, expert))
    for parts in held.values():
        parts.sort(key=lambda part: part.stored.start)
        if not _fit(parts, recorded):
            raise RunError(
                f"{path}: {named([part.name for part in parts])}: the plan's shapes are others"
            )
    return held


def _fit(parts: list[Part], recorded: Mapping[str, Tensor]) -> bool:
    """Whether parts of these sizes make up a tensor, which leaves out padding; experts have
    none.
    """
    left = sum(part.of(recorded).numel() for part in parts) - prod(parts[0].stored.shape)
    is_whole = all(part.is_whole(part.of(recorded)) for part in parts)
    return is_whole and (left == 0 if parts[0].stored.each[0] else left >= 0)


def _by_number(name: str) -> list[tuple[int, str]]:
    """Layer 2 comes before layer 10."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", name)]


def made(parts: list[Part], dtype: torch.dtype, saved: Saved) -> Made:
    """A tensor as files have it, of parameters in a checkpoint."""
    stored = parts[0].stored
    dtype = torch.float32 if stored.wide else dtype

    def value() -> Tensor:
        return _joined(parts, saved.whole([*dict.fromkeys(part.name for part in parts)])).to(dtype)

    return Made(prod(stored.shape) * dtype.itemsize, value)


def _split(sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """The tensors of each file, by its name."""
    groups, left = list[list[str]](), 0
    for tensor, size in sizes.items():
        if size > left:
            groups.append([])
            left = LARGEST
        groups[-1].append(tensor)
        left -= size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {
        f"model-{n:05d}-of-{len(groups):05d}.safetensors": group
        for n, group in enumerate(groups, 1)
    }


def _joined(parts: list[Part], read: Mapping[str, Tensor]) -> Tensor:
    """A tensor's parts one after the other, without padding."""
    stored, values = parts[0].stored, [(part.stored, part.of(read)) for part in parts]
    whole = torch.cat(
        [each.pairs(value.reshape(each.rows(value.numel()))) for each, value in values]
    )
    return (
        whole[: stored.shape[-1]].T.contiguous() if stored.transposed else whole[: stored.shape[0]]
    )


def _index(files: Mapping[str, list[str]], size: int) -> str:
    """The index of files, as Hugging Face writes it."""
    where = {tensor: file for file, tensors in files.items() for tensor in tensors}
    return json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=2) + "\n"
