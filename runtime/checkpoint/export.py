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

from ..errors import RunError, quote_first_names
from .hf_weights import INDEX, HFNames, HFWeight, Places, safetensors
from .reader import Saved, open_saved

LARGEST = 5 * 10**9
"""Bytes of a file, unless a single tensor is larger."""


@dataclass(frozen=True)
class Part:
    """A tensor's part of a parameter: all of it, or one expert's."""

    name: str
    stored: HFWeight
    expert: int

    def get_from(self, values: Mapping[str, Tensor]) -> Tensor:
        """The part's values, by the parameters' whole values; `values` are by name."""
        return values[self.name].tensor_split(self.stored.each[1])[self.expert]

    def is_whole(self, value: Tensor) -> bool:
        """Whether `value`, this part's, is whole rows of the tensor, or whole heads."""
        head = self.stored.interleaved[-1] if self.stored.interleaved else 1
        return value.numel() % (prod(self.stored.rows(0)[1:]) * head) == 0


PartsByTensor = dict[str, list[Part]]
"""By tensor of the files, the parts of parameters that it holds, one after the other."""


def export(path: Path | Saved, folder: Path, names: HFNames) -> None:
    """Writes the parameters of a checkpoint, open or not, into the new `folder`, whole or not
    at all.  RunError.
    """
    saved = open_saved(path)
    parts_by_tensor = find_parts(saved.parameters(), names.places, saved.path)
    tensors = dict[str, LazyTensor]()
    for tensor, parts in parts_by_tensor.items():
        tensors[tensor] = make_tensor(parts, names.dtype, saved)
    put_tensors(folder, tensors)


@dataclass(frozen=True)
class LazyTensor:
    """A tensor to be written: its size in bytes, and a function that makes it when its file is
    written.
    """

    size: int
    value: Callable[[], Tensor]


def put_tensors(
    folder: Path, tensors: Mapping[str, LazyTensor], beside: Mapping[str, str] | None = None
) -> None:
    """Writes safetensors, and files of text `beside` them, into the new `folder`, whole or not
    at all.  RunError.
    """
    package = safetensors()
    if folder.exists():
        raise RunError(f"{folder} is there already: name a new folder")
    sizes = {name: tensor.size for name, tensor in tensors.items()}
    files = _split(sizes)
    with draft(folder) as part:
        for file, names in files.items():
            values = {tensor: tensors[tensor].value() for tensor in names}
            try:
                with _readable(part / file) as written:
                    package.torch.save_file(values, written, metadata={"format": "pt"})
            except package.SafetensorError as error:
                raise RunError(f"cannot write {part / file}: {error}") from None
        if len(files) > 1:
            (part / INDEX).write_text(_index(files, sum(sizes.values())), "utf-8")
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
    """Gives a file that is written while entered the rights of any new file; safetensors writes
    one that its owner alone can read.
    """
    path.touch()
    mode = path.stat().st_mode
    yield path
    path.chmod(mode)


def find_parts(recorded: Mapping[str, Tensor], places: Places, path: Path) -> PartsByTensor:
    """The parts that each tensor of the files holds.

    RunError unless the checkpoint at `path` has the plan's parameters, in its shapes, and no
    others.
    """
    lacking = [name for name in places if name not in recorded]
    if lacking:
        raise RunError(f"{path} lacks {quote_first_names(lacking)}")
    others = [name for name in recorded if name not in places]
    if others:
        raise RunError(f"{path} has {quote_first_names(others)}, which the plan has not")
    parts_by_tensor: PartsByTensor = {}
    for name in sorted(recorded, key=_by_number):
        tensors, stored = places[name]
        for expert, tensor in enumerate(tensors):
            parts_by_tensor.setdefault(tensor, []).append(Part(name, stored, expert))
    for parts in parts_by_tensor.values():
        parts.sort(key=lambda part: part.stored.start)
        if not _fit(parts, recorded):
            raise RunError(
                f"{path}: {quote_first_names([part.name for part in parts])}:"
                " the plan's shapes are others"
            )
    return parts_by_tensor


def _fit(parts: list[Part], recorded: Mapping[str, Tensor]) -> bool:
    """Whether the parts make up a tensor of the files.

    A tensor leaves out a parameter's padding; parameters of experts have none.
    """
    surplus = sum(part.get_from(recorded).numel() for part in parts) - prod(parts[0].stored.shape)
    if not all(part.is_whole(part.get_from(recorded)) for part in parts):
        return False
    is_of_experts = bool(parts[0].stored.each[0])
    return surplus == 0 if is_of_experts else surplus >= 0


def _by_number(name: str) -> list[tuple[int, str]]:
    """A key to sort names by: layer 2 comes before layer 10."""
    key = list[tuple[int, str]]()
    for word in re.split(r"(\d+)", name):
        if word.isdigit():
            key.append((int(word), ""))
        else:
            key.append((-1, word))
    return key


def make_tensor(parts: list[Part], dtype: torch.dtype, saved: Saved) -> LazyTensor:
    """A tensor of the files, made of parameters in a checkpoint."""
    stored = parts[0].stored
    file_dtype = torch.float32 if stored.wide else dtype
    names = [*dict.fromkeys(part.name for part in parts)]

    def make_value() -> Tensor:
        return _join_parts(parts, saved.whole(names)).to(file_dtype)

    return LazyTensor(prod(stored.shape) * file_dtype.itemsize, make_value)


def _split(sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """The tensors of each file, by its name."""
    groups, space_left = list[list[str]](), 0
    for tensor, size in sizes.items():
        if size > space_left:
            groups.append([])
            space_left = LARGEST
        groups[-1].append(tensor)
        space_left -= size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    files = dict[str, list[str]]()
    for number, group in enumerate(groups, 1):
        files[f"model-{number:05d}-of-{len(groups):05d}.safetensors"] = group
    return files


def _join_parts(parts: list[Part], values_by_name: Mapping[str, Tensor]) -> Tensor:
    """A tensor's parts one after the other, without padding."""
    pieces = list[Tensor]()
    for part in parts:
        value = part.get_from(values_by_name)
        rows = value.reshape(part.stored.rows(value.numel()))
        pieces.append(part.stored.pairs(rows))
    whole, stored = torch.cat(pieces), parts[0].stored
    if stored.transposed:
        return whole[: stored.shape[-1]].T.contiguous()
    return whole[: stored.shape[0]]


def _index(files: Mapping[str, list[str]], size: int) -> str:
    """The index of files, as Hugging Face writes it."""
    file_of = dict[str, str]()
    for file, tensors in files.items():
        file_of |= dict.fromkeys(tensors, file)
    return json.dumps({"metadata": {"total_size": size}, "weight_map": file_of}, indent=2) + "\n"
