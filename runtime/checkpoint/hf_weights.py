"""Loads weights from safetensors, by their Hugging Face names.

Each rank reads its own part of each tensor and nothing else; what only one of plan and files has is
an error.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from importlib import import_module
from itertools import product
from math import prod
from pathlib import Path
from socket import gethostname
from typing import Any

import torch
from torch import Tensor

from ..comm import c10d
from ..comm.mesh import Mesh
from ..comm.store import job_store, meet
from ..comm.witness import rank_of_previous_node
from ..errors import RunError, named
from ..state.engine import TrainState
from ..state.parameters import Spec
from .agreement import together
from .files import DAMAGE, and_is, cores_of_rank, index_of, is_within, size_of
from .foreign_weights import lacking_names, missing, unreadable

INDEX = "model.safetensors.index.json"
BUFFERS = (
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    ".rotary_emb.inv_freq",
)
"""Ends of names that older files hold though they are no weights: masks and frequencies."""

ROWS = 256
"""Rows of a tensor that are compared at once."""

_PIECE = 1 << 24  # bytes that a thread hashes at a time

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class HFWeight:
    """Where files hold a parameter: in the rows from `start` on of a tensor of `shape`, or of its
    transpose.

    Where `each` is ("experts", 8), there are 8 such tensors, of equal parts of the parameter's
    first dim.  Where `interleaved` is (0, 64, 256), rows 0 to 63 of the 256 of each head are pairs:
    (0, 1), (2, 3), … A file may have more `positions` than the plan's sequences: its first rows are
    read.
    """

    tensor: (
        # {i} is the first index in the parameter's name, {j} the second, as in {2*i+1}; {experts}
        # that of `each`
        str
    )
    shape: tuple[int, ...]
    each: tuple[str, int] = "", 1
    start: int = 0
    transposed: bool = False
    interleaved: tuple[int, int, int] | None = None
    positions: bool = False
    wide: bool = False  # float32 in files of any element type, as biases of routers are

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> "HFWeight":
        """By what JSON says of it."""
        tuples: dict[str, Any] = {
            key: tuple(said[key]) for key in ("shape", "each", "interleaved") if key in said
        }
        return cls(**{**said, **tuples})

    def named(self, indices: Sequence[int]) -> tuple[str, ...]:
        """The tensors of one repetition."""
        value, (dim, count) = dict(zip("ij", indices, strict=False)), self.each
        return tuple(self._named({**value, dim: at}) for at in range(count))

    def _named(self, value: Mapping[str, int]) -> str:
        def index(braces: re.Match[str]) -> str:
            terms = (term.split("*") for term in braces[1].split("+"))
            return str(sum(prod(int(value.get(word, word)) for word in term) for term in terms))

        return re.sub(r"\{(.*?)\}", index, self.tensor)

    def is_longer(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape has all positions, and more."""
        return self.positions and shape[1:] == self.shape[1:] and shape[:1] > self.shape[:1]

    def rows(self, count: int) -> tuple[int, ...]:
        """The shape of `count` of its elements."""
        columns = self.shape[::-1][1:] if self.transposed else self.shape[1:]
        return (count // prod(columns), *columns)

    def of(self, tensors: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        """A parameter of this shape, of the whole tensors that hold it; rows after their last
        are padding, and 0.
        """
        rows, *columns = (slice(0, size) for size in self.rows(prod(shape) // len(tensors)))
        return torch.cat(
            [self.halves(_rows(each, self, rows, *columns)) for each in tensors]
        ).reshape(shape)

    def halves(self, rows: Tensor) -> Tensor:
        """Rows of whole heads as a file has them, in the parameter's order: first rows of pairs
        before second ones.
        """
        return self._heads(rows, (-1, 2))

    def pairs(self, rows: Tensor) -> Tensor:
        """The inverse of `halves`."""
        return self._heads(rows, (2, -1))

    def _heads(self, rows: Tensor, turned: tuple[int, int]) -> Tensor:
        if not self.interleaved:
            return rows
        start, stop, head = self.interleaved
        heads = rows.reshape(-1, head, *rows.shape[1:])
        pairs = heads[:, start:stop].reshape(len(heads), *turned, *rows.shape[1:])
        turned_rows = pairs.transpose(1, 2).flatten(1, 2)
        return torch.cat([heads[:, :start], turned_rows, heads[:, stop:]], 1).flatten(0, 1)


Places = Mapping[str, tuple[tuple[str, ...], HFWeight]]
"""The tensors that hold each parameter, by its name, and which part of them."""


@dataclass(frozen=True)
class HFNames:
    """A plan's description of such files: the element type they are written in, and the parameters,
    by name pattern.

    `repeats` is how often each repeat is repeated, by what patterns have before its `*`.
    """

    dtype: torch.dtype
    stored: Mapping[str, HFWeight]
    repeats: Mapping[str, int]

    @property
    def have_parameter_names(self) -> bool:
        """Whether tensors have the names of the parameters: the plan gives them no others."""
        tensor_patterns = {
            pattern: re.sub(r"\{.*?\}", "*", weight.tensor)
            for pattern, weight in self.stored.items()
        }
        return all(
            tensor in (pattern, f"{pattern}.*") for pattern, tensor in tensor_patterns.items()
        )

    @cached_property
    def places(self) -> Places:
        """The tensors of each parameter of the plan, for all ranks and stages."""
        return {
            pattern.replace("*", "{}").format(*indices): (stored.named(indices), stored)
            for pattern, stored in self.stored.items()
            for indices in product(*map(range, self._counts(pattern)))
        }

    def _counts(self, pattern: str) -> Iterator[int]:
        """How often each repeat around a parameter is repeated, outermost first."""
        paths = pattern.split(".*")
        return (self.repeats[".*".join(paths[:depth])] for depth in range(1, len(paths)))


_Taken = tuple[str, list[list[int]], str]
"""A part that a rank has read of a tensor: the tensor, first and last index along each dim, the
hash of the values.
"""


class _Noted:
    """A tensor of a file, of which each part that is read is noted."""

    def __init__(self, view: Any, tensor: str, taken: list[_Taken]) -> None:
        self._view, self._tensor, self._taken = view, tensor, taken

    def __getitem__(self, wanted: tuple[slice, ...]) -> Tensor:
        part = self._view[wanted]
        extent = [[each.start, each.stop] for each in wanted]
        self._taken.append((self._tensor, extent, _hash(part)))
        return part


class Reader:
    """Files that are open for reading: one, or a folder of them.

    RunError where there are none, or they and the plan do not have the same tensors.
    """

    def __init__(self, path: Path, names: HFNames) -> None:
        self._path, self._file_of = path, _opened(path)
        self._taken: list[_Taken] | None = None
        prefix = self._left_out(names)
        self._places = {
            name: (tuple(tensor.removeprefix(prefix) for tensor in tensors), part)
            for name, (tensors, part) in names.places.items()
        }
        self._check_names()
        held = ((tensor, stored) for tensors, stored in self._places.values() for tensor in tensors)
        self._cut = {note for tensor, stored in held if (note := self._compared(tensor, stored))}

    def _left_out(self, names: HFNames) -> str:
        """The prefix that names of a model without its head lack, as GPT-2's `transformer.`."""
        first, *others = {stored.tensor.partition(".")[0] for stored in names.stored.values()}
        prefix = f"{first}."
        return "" if others or any(name.startswith(prefix) for name in self._file_of) else prefix

    def _check_names(self) -> None:
        """RunError unless the files hold the plan's tensors, and no others."""
        names = {tensor: name for name, (tensors, _) in self._places.items() for tensor in tensors}
        if lacking := {
            tensor: name for tensor, name in names.items() if tensor not in self._file_of
        }:
            shapes = {
                tensor: stored.shape
                for tensors, stored in self._places.values()
                for tensor in tensors
            }
            there = {tensor: tuple(self._slice(tensor).get_shape()) for tensor in self._file_of}
            raise lacking_names(self._path, lacking, shapes, there)
        left = (
            name
            for name in sorted(self._file_of)
            if name not in names and not name.endswith(BUFFERS)
        )
        if left := [name for name in left if not self._is_copy(name, names)]:
            raise RunError(f"{self._path}: the plan does not use {named(left)}")

    def _is_copy(self, name: str, used: Iterable[str]) -> bool:
        """Whether a matrix equals one that the plan uses, as a head beside the embedding that
        it is tied to.
        """
        view = self._slice(name)
        rows, *columns = (*view.get_shape(), 0)
        twins = (self._slice(tensor) for tensor in used) if columns[1:] else ()
        alike = (twin for twin in twins if _kind(twin) == _kind(view))
        stretches = [slice(at, at + ROWS) for at in range(0, rows, ROWS)]
        return any(all(torch.equal(twin[part], view[part]) for part in stretches) for twin in alike)

    def _slice(self, tensor: str) -> Any:
        return self._file_of[tensor].get_slice(tensor)

    def _noted(self, tensor: str) -> Any:
        """The same, which notes what is taken of it, where there are several nodes."""
        view = self._slice(tensor)
        return view if self._taken is None else _Noted(view, tensor, self._taken)

    def _compared(self, tensor: str, stored: HFWeight) -> str:
        """The part that the plan takes of a longer tensor, else "".

        RunError if it differs otherwise.
        """
        view = self._slice(tensor)
        shape, dtype = tuple(view.get_shape()), view.get_dtype()
        if shape != stored.shape and not stored.is_longer(shape):
            raise RunError(
                f"{self._path}: `{tensor}` is {list(shape)}, but the plan's is {list(stored.shape)}"
            )
        if dtype not in DTYPES:
            raise RunError(
                f"{self._path}: `{tensor}` is {dtype}, which is not one of {', '.join(DTYPES)}"
            )
        return (
            ""
            if shape == stored.shape
            else f"the first {stored.shape[0]} of {shape[0]} positions of `{tensor}`"
        )

    def __str__(self) -> str:
        """The path, and what the plan takes where it does not take all."""
        return ": ".join([str(self._path), *sorted(self._cut)])

    def fill(self, state: TrainState) -> None:
        """Gives every parameter its value.

        RunError on all ranks where nodes have other files.  Collective.
        """
        previous = rank_of_previous_node()
        self._taken = None if previous is None else []
        together(lambda: state.take(lambda name, spec: self._part(name, spec, state.mesh)))
        if previous is not None:
            self._compare_nodes(previous)

    def _compare_nodes(self, previous: int) -> None:
        """RunError on all ranks unless this node's files have what a rank of the previous node has
        read of its own.

        So all that any rank has read is the same on two nodes at least.
        """
        store, (rank, _) = job_store(), c10d.place()
        assert self._taken is not None, "weights: nothing was noted"
        store.set(f"weights/{rank}", json.dumps([gethostname(), self._taken]))
        meet("weights", "")
        host, taken = json.loads(store.get(f"weights/{previous}"))
        store.delete_key(f"weights/{previous}")
        own = {(tensor, f"{extent}"): digest for tensor, extent, digest in self._taken}
        other = f"rank {previous} on {host}"
        together(lambda: self._check_taken(taken, own, other))

    def _check_taken(
        self, taken: Sequence[_Taken], own: Mapping[tuple[str, str], str], other: str
    ) -> None:
        """RunError unless all parts that another rank has taken are the same here, where some
        were read already.
        """
        for tensor, extent, digest in taken:
            here = own.get((tensor, f"{extent}"))
            if here is None:
                here = _hash(self._slice(tensor)[tuple(slice(*each) for each in extent)])
            if here != digest:
                rank, _ = c10d.place()
                raise RunError(
                    f"`{tensor}` of {self._path} differs between {other} and rank {rank} on"
                    f" {gethostname()}",
                    "the nodes have other files: give all of them the same revision",
                )

    def _part(self, name: str, spec: Spec, mesh: Mesh) -> Tensor:
        """This rank's part of a parameter; of tensors for each expert, those of its experts."""
        tensors, stored = self._places[name]
        if len(tensors) == 1:
            return _part(self._noted(tensors[0]), stored, spec, mesh)
        rows, cut = spec.shape[0] // len(tensors), int(spec.shape[0] == len(tensors))
        first, count = (size // rows for size in (spec.offsets(mesh)[0], spec.local_shape(mesh)[0]))
        split = {dim - cut: axes for dim, axes in spec.split.items() if dim}
        own = Spec((rows, *spec.shape[1:])[cut:], split, spec.init)
        parts = [
            _part(self._noted(tensor), stored, own, mesh)
            for tensor in tensors[first : first + count]
        ]
        return torch.cat(parts).reshape(spec.local_shape(mesh))


def safetensors() -> Any:
    """The package, which no other part of the runtime needs.  RunError where it is missing."""
    try:
        import_module("safetensors.torch")
    except ModuleNotFoundError:
        raise RunError(
            "weights are read and written with the package safetensors: pip install safetensors"
        ) from None
    return import_module("safetensors")


def _hash(part: Tensor) -> str:
    """The hash of the values' bits, by pieces on as many threads as this rank has cores."""
    data: Any = part.contiguous().view(-1).view(torch.uint8).numpy()
    pieces = [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)]
    with ThreadPoolExecutor(cores_of_rank()) as pool:
        return blake2b(b"".join(pool.map(_digest, pieces)), digest_size=16).hexdigest()


def _digest(piece: Any) -> bytes:
    return blake2b(piece, digest_size=16).digest()


def _kind(view: Any) -> tuple[object, ...]:
    """The shape and the element type of a stored tensor."""
    return *view.get_shape(), view.get_dtype()


def _opened(path: Path) -> dict[str, Any]:
    """The tensors at a path, each with the open file that holds it."""
    package = safetensors()
    found: dict[str, Any] = {}
    for file in _files(path):
        if path.is_dir() and not (file.exists() or (path / INDEX).exists()):
            raise missing(path)
        size_of(file)
        try:
            opened = package.safe_open(file, framework="pt", device="cpu")
        except (OSError, package.SafetensorError) as error:
            raise unreadable(file, error) from None
        if twice := found.keys() & opened.keys():
            raise RunError(f"{path}: more than one file has {named(sorted(twice))}")
        found |= dict.fromkeys(opened.keys(), opened)
    return found


def _files(path: Path) -> list[Path]:
    """The files at a path."""
    index = path / INDEX
    if not index.exists():
        return [path / "model.safetensors" if path.is_dir() else path]
    data = index_of(index)
    try:
        names = sorted(set(json.loads(data)["weight_map"].values()))
        wrong = [name for name in names if not is_within(name)]
    except DAMAGE:
        raise RunError(f"{index} is damaged, or no index of weights{and_is(index)}") from None
    if wrong:
        raise RunError(f"{index} names {named(wrong)}, which cannot be a file in its folder")
    return [path / name for name in names]


def _part(view: Any, stored: HFWeight, spec: Spec, mesh: Mesh) -> Tensor:
    """Reads a box: along each stored dim the stretch that the first of its dims asks for; the
    rest is cut after.
    """
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


def _rows(view: Any, stored: HFWeight, rows: slice, *columns: slice) -> Tensor:
    """A stretch of a parameter's rows; those after the tensor's last are padding, and 0."""
    last = stored.shape[-1 if stored.transposed else 0]
    start, stop = (min(stored.start + at, last) for at in (rows.start, rows.stop))
    wanted = (slice(start, stop), *columns)
    read = view[wanted[::-1]].T if stored.transposed else view[wanted]
    padding = read.new_zeros(rows.stop - rows.start - (stop - start), *read.shape[1:])
    return torch.cat([read, padding]) if len(padding) else read


def _grouped(shape: tuple[int, ...], into: tuple[int, ...]) -> list[list[int]]:
    """The dims that make up each stored dim: those of (4, 16, 64) make (64, 64) as [[0, 1],
    [2]].
    """
    groups, dims = list[list[int]](), list(range(len(shape)))
    for size in into:
        group = [dims.pop(0)]
        while prod(shape[dim] for dim in group) < size:
            group.append(dims.pop(0))
        groups.append(group)
    assert not dims or prod(shape[dim] for dim in dims) == 1, (
        f"weights: {shape} does not make {into}"
    )
    groups[-1] += dims
    return groups
