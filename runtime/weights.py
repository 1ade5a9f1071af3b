"""Weights from safetensors, under the names that Hugging Face gives them.

Purpose: each rank reads its own part of each tensor and nothing else; what only one of plan and files has is an error.
Non-goals: writing them (`export`); the configuration and the tokenizer, which lie beside such files.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import RunError
from .mesh import Mesh
from .parameters import Spec
from .state import State

INDEX = "model.safetensors.index.json"
BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
"""Ends of names that older files hold though they are no weights: masks and frequencies."""

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Stored:
    """Where files hold a parameter: in the rows from `start` on of a tensor of `shape`, or of its transpose.

    Where `interleaved` is (64, 256), of the 256 rows of each head the first 64 stand pair by pair: (0, 1), (2, 3), …
    """

    tensor: str  # {i} stands for the first index in the parameter's name, {j} for the second, as in {2*i+1}
    shape: tuple[int, ...]
    start: int = 0
    transposed: bool = False
    interleaved: tuple[int, int] | None = None

    def named(self, indices: list[str]) -> str:
        """The tensor of one repetition."""
        value = dict(zip("ij", indices, strict=False))

        def index(braces: re.Match[str]) -> str:
            terms = (term.split("*") for term in braces[1].split("+"))
            return str(sum(prod(int(value.get(word, word)) for word in term) for term in terms))

        return re.sub(r"\{(.*?)\}", index, self.tensor)

    def rows(self, count: int) -> tuple[int, ...]:
        """The shape of `count` elements of it: so many rows."""
        columns = self.shape[::-1][1:] if self.transposed else self.shape[1:]
        return (count // prod(columns), *columns)

    def halves(self, rows: Tensor) -> Tensor:
        """Rows of whole heads as a file has them, in the parameter's order: first rows of pairs before second ones."""
        return self._heads(rows, (-1, 2))

    def pairs(self, rows: Tensor) -> Tensor:
        """The inverse of `halves`."""
        return self._heads(rows, (2, -1))

    def _heads(self, rows: Tensor, turned: tuple[int, int]) -> Tensor:
        if not self.interleaved:
            return rows
        count, head = self.interleaved
        heads = rows.reshape(-1, head, *rows.shape[1:])
        pairs = heads[:, :count].reshape(len(heads), *turned, *rows.shape[1:])
        return torch.cat([pairs.transpose(1, 2).flatten(1, 2), heads[:, count:]], 1).flatten(0, 1)


@dataclass(frozen=True)
class HuggingFace:
    """What a plan says of such files: the element type they are written in, and the parameters, by name pattern."""

    dtype: torch.dtype
    stored: Mapping[str, Stored]

    def place(self, parameter: str) -> tuple[str, Stored]:
        """The tensor that holds a parameter, and what part of it: `layers.3.wq` goes by `layers.*.wq`."""
        parts = parameter.split(".")
        stored = self.stored[".".join("*" if part.isdigit() else part for part in parts)]
        return stored.named([part for part in parts if part.isdigit()]), stored


class Reader:
    """Files that are open for reading: one, or a folder of them.  RunError where there are none."""

    def __init__(self, path: Path, names: HuggingFace) -> None:
        self._path, self._names = path, names
        self._file_of = {name: file for file in _files(path) for name in file.keys()}  # noqa: SIM118 (no dict)
        self._prefix = self._left_out()
        self._left = {name for name in self._file_of if not name.endswith(BUFFERS)}

    def _left_out(self) -> str:
        """What the names of a model without its head lack: the first word of all others, as GPT-2's `transformer.`."""
        first, *others = {stored.tensor.partition(".")[0] for stored in self._names.stored.values()}
        prefix = f"{first}."
        return "" if others or any(name.startswith(prefix) for name in self._file_of) else prefix

    def fill(self, state: State) -> None:
        """Gives every parameter its value.  RunError where files and plan do not have the same tensors."""
        state.take(lambda name, spec: self._part(name, spec, state.mesh))
        if self._left:
            some = ", ".join(f"`{name}`" for name in sorted(self._left)[:3])
            raise RunError(f"{self._path}: the plan does not use {len(self._left)} of its tensors, for instance {some}")

    def _part(self, name: str, spec: Spec, mesh: Mesh) -> Tensor:
        """This rank's part of a parameter."""
        tensor, stored = self._names.place(name)
        tensor = tensor.removeprefix(self._prefix)
        if tensor not in self._file_of:
            raise RunError(f"{self._path} has no `{tensor}`, which holds the plan's `{name}`")
        self._left.discard(tensor)
        view = self._file_of[tensor].get_slice(tensor)
        shape, dtype = tuple(view.get_shape()), DTYPES.get(view.get_dtype())
        if shape != stored.shape:
            raise RunError(f"{self._path}: `{tensor}` is {list(shape)}, but the plan's is {list(stored.shape)}")
        if dtype is None:
            raise RunError(f"{self._path}: `{tensor}` is {view.get_dtype()}, which is not one of {', '.join(DTYPES)}")
        return _part(view, stored, spec, mesh)


def safetensors() -> Any:
    """The package, which no other part of the runtime needs.  RunError where it is missing."""
    try:
        import safetensors.torch as found
    except ModuleNotFoundError:
        raise RunError("weights are read and written with the package safetensors: pip install safetensors") from None
    return found


def _files(path: Path) -> list[Any]:
    """The files at a path, open."""
    safetensors()
    from safetensors import SafetensorError, safe_open

    index = path / INDEX
    try:
        if index.exists():
            paths = [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        else:
            paths = [path / "model.safetensors" if path.is_dir() else path]
        return [safe_open(file, framework="pt", device="cpu") for file in paths]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise RunError(f"cannot read weights from {path}: {error}") from None


def _part(view: Any, stored: Stored, spec: Spec, mesh: Mesh) -> Tensor:
    """Reads a box: along each stored dim the stretch that the first of its dims asks for; the rest is cut after."""
    whole = stored.rows(prod(spec.shape))
    offsets, sizes = list(spec.offsets(mesh)), spec.local_shape(mesh)
    stretches, shape = list[slice](), list[int]()
    for size, (first, *others) in zip(whole, _grouped(spec.shape, whole), strict=True):
        unit = size // spec.shape[first]
        start = offsets[first] * unit
        stretches.append(slice(start, start + sizes[first] * unit))
        shape += [sizes[first], *(spec.shape[dim] for dim in others)]
        offsets[first] = 0
    box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
    return stored.halves(_rows(view, stored, *stretches)).reshape(shape)[box]


def _rows(view: Any, stored: Stored, rows: slice, *columns: slice) -> Tensor:
    """A stretch of a parameter's rows; those behind the tensor's last are padding, and 0."""
    last = stored.shape[-1 if stored.transposed else 0]
    start, stop = (min(stored.start + at, last) for at in (rows.start, rows.stop))
    wanted = (slice(start, stop), *columns)
    read = view[wanted[::-1]].T if stored.transposed else view[wanted]
    padding = read.new_zeros(rows.stop - rows.start - (stop - start), *read.shape[1:])
    return torch.cat([read, padding]) if len(padding) else read


def _grouped(shape: tuple[int, ...], into: tuple[int, ...]) -> list[list[int]]:
    """The dims that make up each stored dim: those of (4, 16, 64) make (64, 64) as [[0, 1], [2]]."""
    groups, dims = list[list[int]](), list(range(len(shape)))
    for size in into:
        group = [dims.pop(0)]
        while prod(shape[dim] for dim in group) < size:
            group.append(dims.pop(0))
        groups.append(group)
    assert not dims or prod(shape[dim] for dim in dims) == 1, f"weights: {shape} does not make {into}"
    groups[-1] += dims
    return groups
