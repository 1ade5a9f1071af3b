"""Exports a checkpoint's parameters as safetensors, under their Hugging Face names.

One process does it, on any machine: no mesh, no GPU, and no more memory than a file of the result takes.
"""

import json
import os
import re
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ..errors import RunError, named
from .hf_weights import INDEX, HFNames, HFWeight, safetensors
from .reader import Saved

LARGEST = 5 * 10**9
"""Bytes of a file, unless a single tensor is larger."""

Held = dict[str, list[tuple[str, HFWeight]]]
"""The parameters in each tensor, one after the other."""


def export(path: Path, folder: Path, names: HFNames) -> None:
    """Writes the parameters of the checkpoint at `path` into the new `folder`, whole or not at all.  RunError."""
    if folder.exists():
        raise RunError(f"{folder} is there already: name a new folder")
    package, saved = safetensors(), Saved(path)
    recorded = saved.parameters()
    held = _held(recorded, names, path)
    files = _split({tensor: _bytes(parts, names) for tensor, parts in held.items()})
    with _draft(folder) as part:
        for file, tensors in files.items():
            values = _values({tensor: held[tensor] for tensor in tensors}, saved, names.dtype)
            try:
                with _readable(part / file) as written:
                    package.torch.save_file(values, written, metadata={"format": "pt"})
            except package.SafetensorError as error:
                raise RunError(f"cannot write {part / file}: {error}") from None
        if len(files) > 1:
            (part / INDEX).write_text(_index(files, sum(_bytes(parts, names) for parts in held.values())), "utf-8")


@contextmanager
def _draft(folder: Path) -> Generator[Path]:
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
    """The path of a new file that others may read as any new file; safetensors writes one for its owner alone."""
    path.touch()
    mode = path.stat().st_mode
    yield path
    path.chmod(mode)


def _held(recorded: Mapping[str, Tensor], names: HFNames, path: Path) -> Held:
    """RunError unless the plan's parameters are those of the checkpoint at `path`."""
    if lacking := [name for name in names.places if name not in recorded]:
        raise RunError(f"{path} lacks {named(lacking)}")
    if others := [name for name in recorded if name not in names.places]:
        raise RunError(f"{path} has {named(others)}, which the plan has not")
    held: Held = {}
    for name in sorted(recorded, key=_by_number):
        tensor, stored = names.places[name]
        held.setdefault(tensor, []).append((name, stored))
    for parts in held.values():
        parts.sort(key=lambda part: part[1].start)
        if not _fit(parts, recorded):
            raise RunError(f"{path}: {named([name for name, _ in parts])}: the plan's shapes are others")
    return held


def _fit(parts: list[tuple[str, HFWeight]], recorded: Mapping[str, Tensor]) -> bool:
    """Whether parameters of these sizes are whole rows, or heads, of a tensor, and enough of them."""
    stored, counts = parts[0][1], [recorded[name].numel() for name, _ in parts]
    row = prod(stored.rows(0)[1:])
    wholes = [row * (each.interleaved[-1] if each.interleaved else 1) for _, each in parts]
    is_whole = all(count % whole == 0 for count, whole in zip(counts, wholes, strict=True))
    return is_whole and sum(counts) >= prod(stored.shape)


def _by_number(name: str) -> list[tuple[int, str]]:
    """Layer 2 comes before layer 10."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", name)]


def _bytes(parts: list[tuple[str, HFWeight]], names: HFNames) -> int:
    return prod(parts[0][1].shape) * names.dtype.itemsize


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
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": group for n, group in enumerate(groups, 1)}


def _values(held: Held, saved: Saved, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors as files have them."""
    names = [name for parts in held.values() for name, _ in parts]
    read = saved.whole(names)
    return {tensor: _joined(parts, read).to(dtype) for tensor, parts in held.items()}


def _joined(parts: list[tuple[str, HFWeight]], read: Mapping[str, Tensor]) -> Tensor:
    """A tensor's parts one after the other, without padding."""
    stored = parts[0][1]
    whole = torch.cat([each.pairs(read[name].reshape(each.rows(read[name].numel()))) for name, each in parts])
    return whole[: stored.shape[-1]].T.contiguous() if stored.transposed else whole[: stored.shape[0]]


def _index(files: Mapping[str, list[str]], size: int) -> str:
    """The index of files, as Hugging Face writes it."""
    where = {tensor: file for file, tensors in files.items() for tensor in tensors}
    return json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=2) + "\n"
