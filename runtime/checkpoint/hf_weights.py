"""Loads weights from safetensors, by their Hugging Face names.

Each rank reads its own part of each tensor and nothing else.  A tensor that only the plan or only
the files have is an error.
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
from ..errors import RunError, quote_first_names
from ..state.engine import TrainState
from ..state.parameters import Spec
from .agreement import together
from .files import DAMAGE, cores_of_rank, describe_format, index_of, is_within, size_of
from .foreign_weights import lacking_names, missing, unreadable

INDEX = "model.safetensors.index.json"
BUFFERS = (
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    ".rotary_emb.inv_freq",
)
"""Ends of the names of tensors in older files that are no weights: masks and frequencies."""

ROWS = 256
"""Rows of a tensor that are compared at once."""

_PIECE = 1 << 24  # bytes that a thread hashes at a time

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class HFWeight:
    """Where files hold a parameter: in the rows from `start` on of a tensor of `shape`, or of its
    transpose.

    Where `each` is ("experts", 8), 8 tensors hold equal parts of the parameter's first dim.
    Where `interleaved` is (0, 64, 256), a head has 256 rows, and its rows 0 to 63 are pairs:
    (0, 1), (2, 3), … A file may have more `positions` than the plan's sequences: its first rows are
    read.
    """

    tensor: (
        # {i} is the first index in the parameter's name, {j} the second, as in {2*i+1}; {experts}
        # is the index of one of `each`
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
    def read(cls, fields: Mapping[str, Any]) -> "HFWeight":
        """Makes it of its fields in JSON, which has lists for tuples."""
        tuples = dict[str, Any]()
        for key in ("shape", "each", "interleaved"):
            if key in fields:
                tuples[key] = tuple(fields[key])
        return cls(**{**fields, **tuples})

    def get_tensor_names(self, indices: Sequence[int]) -> tuple[str, ...]:
        """The names of the tensors of one repetition."""
        index_of, (dim, count) = dict(zip("ij", indices, strict=False)), self.each
        return tuple(self._fill_in({**index_of, dim: number}) for number in range(count))

    def _fill_in(self, index_of: Mapping[str, int]) -> str:
        def evaluate(braces: re.Match[str]) -> str:
            total = 0
            for term in braces[1].split("+"):
                total += prod(int(index_of.get(word, word)) for word in term.split("*"))
            return str(total)

        return re.sub(r"\{(.*?)\}", evaluate, self.tensor)

    def is_longer(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape has all positions, and more."""
        return self.positions and shape[1:] == self.shape[1:] and shape[:1] > self.shape[:1]

    def rows(self, count: int) -> tuple[int, ...]:
        """The shape of `count` of its elements: whole rows of the parameter."""
        shape = self.shape[::-1] if self.transposed else self.shape
        columns = shape[1:]
        return (count // prod(columns), *columns)

    def to_parameter(self, tensors: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        """A parameter of this shape, made of the whole tensors that hold it; rows after their last
        are padding, and 0.
        """
        rows, *columns = (slice(0, size) for size in self.rows(prod(shape) // len(tensors)))
        parts = [self.halves(_rows(tensor, self, rows, *columns)) for tensor in tensors]
        return torch.cat(parts).reshape(shape)

    def halves(self, rows: Tensor) -> Tensor:
        """Puts rows of whole heads from a file into the parameter's order: the first rows of all
        pairs before the second ones.
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
"""By parameter, the tensors of the files that hold it, and how they hold it."""


@dataclass(frozen=True)
class HFNames:
    """A plan's description of such files: the element type they are written in, and the parameters,
    by name pattern.

    `repeats` says how often each repeat is repeated; its keys are the patterns' text before the
    repeat's `*`.
    """

    dtype: torch.dtype
    stored: Mapping[str, HFWeight]
    repeats: Mapping[str, int]

    @property
    def have_parameter_names(self) -> bool:
        """Whether tensors have the names of the parameters: the plan gives them no others."""
        for pattern, weight in self.stored.items():
            tensor_pattern = re.sub(r"\{.*?\}", "*", weight.tensor)
            if tensor_pattern not in (pattern, f"{pattern}.*"):
                return False
        return True

    @cached_property
    def places(self) -> Places:
        """The tensors of each parameter of the plan, for all ranks and stages."""
        places = dict[str, tuple[tuple[str, ...], HFWeight]]()
        for pattern, stored in self.stored.items():
            template = pattern.replace("*", "{}")
            for indices in product(*map(range, self._counts(pattern))):
                places[template.format(*indices)] = stored.get_tensor_names(indices), stored
        return places

    def _counts(self, pattern: str) -> Iterator[int]:
        """How often each repeat around a parameter is repeated, outermost first."""
        paths = pattern.split(".*")
        return (self.repeats[".*".join(paths[:depth])] for depth in range(1, len(paths)))


_Reading = tuple[str, list[list[int]], str]
"""A part of a tensor that a rank has read: the tensor's name, the start and the stop along each
dim, the hash of the values.
"""


class _NotingSlice:
    """A tensor of a file that notes each part that is read."""

    def __init__(self, view: Any, tensor: str, readings: list[_Reading]) -> None:
        self._view, self._tensor, self._taken = view, tensor, readings

    def __getitem__(self, wanted: tuple[slice, ...]) -> Tensor:
        part = self._view[wanted]
        extent = [[stretch.start, stretch.stop] for stretch in wanted]
        self._taken.append((self._tensor, extent, _hash(part)))
        return part


class Reader:
    """Files that are open for reading: one, or a folder of them.

    RunError where there are none, or they and the plan do not have the same tensors.
    """

    def __init__(self, path: Path, names: HFNames) -> None:
        self._path, self._file_of = path, _open_files(path)
        self._taken: list[_Reading] | None = None
        prefix = self._find_omitted_prefix(names)
        self._places = dict[str, tuple[tuple[str, ...], HFWeight]]()
        for name, (tensors, stored) in names.places.items():
            file_names = tuple(tensor.removeprefix(prefix) for tensor in tensors)
            self._places[name] = file_names, stored
        self._check_names()
        self._cut = set[str]()
        for tensors, stored in self._places.values():
            for tensor in tensors:
                if note := self._compare_shape(tensor, stored):
                    self._cut.add(note)

    def _find_omitted_prefix(self, names: HFNames) -> str:
        """The prefix that names of a model without its head lack, as GPT-2's `transformer.`."""
        first, *others = {stored.tensor.partition(".")[0] for stored in names.stored.values()}
        prefix = f"{first}."
        if others or any(name.startswith(prefix) for name in self._file_of):
            return ""
        return prefix

    def _check_names(self) -> None:
        """RunError unless the files hold the plan's tensors, and no others."""
        param_of = dict[str, str]()
        shapes = dict[str, tuple[int, ...]]()
        for name, (tensors, stored) in self._places.items():
            for tensor in tensors:
                param_of[tensor], shapes[tensor] = name, stored.shape
        lacking = {tensor: name for tensor, name in param_of.items() if tensor not in self._file_of}
        if lacking:
            file_shapes = dict[str, tuple[int, ...]]()
            for tensor in self._file_of:
                file_shapes[tensor] = tuple(self._slice(tensor).get_shape())
            raise lacking_names(self._path, lacking, shapes, file_shapes)
        unused = list[str]()
        for tensor in sorted(self._file_of):
            is_foreign = tensor not in param_of and not tensor.endswith(BUFFERS)
            if is_foreign and not self._is_copy(tensor, param_of):
                unused.append(tensor)
        if unused:
            raise RunError(f"{self._path}: the plan does not use {quote_first_names(unused)}")

    def _is_copy(self, name: str, used: Iterable[str]) -> bool:
        """Whether a matrix equals one that the plan uses, as a head beside the embedding that
        it is tied to.
        """
        view = self._slice(name)
        rows, *columns = (*view.get_shape(), 0)
        if not columns[1:]:  # no matrix
            return False
        stretches = [slice(start, start + ROWS) for start in range(0, rows, ROWS)]
        for tensor in used:
            twin = self._slice(tensor)
            if _kind(twin) == _kind(view) and all(
                torch.equal(twin[stretch], view[stretch]) for stretch in stretches
            ):
                return True
        return False

    def _slice(self, tensor: str) -> Any:
        return self._file_of[tensor].get_slice(tensor)

    def _get_noting_slice(self, tensor: str) -> Any:
        """The same slice; where there are several nodes, it notes the parts that are read."""
        view = self._slice(tensor)
        if self._taken is None:
            return view
        return _NotingSlice(view, tensor, self._taken)

    def _compare_shape(self, tensor: str, stored: HFWeight) -> str:
        """The words for the part that the plan takes of a longer tensor, else "".

        RunError if the tensor differs in any other way.
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
        if shape == stored.shape:
            return ""
        return f"the first {stored.shape[0]} of {shape[0]} positions of `{tensor}`"

    def __str__(self) -> str:
        """The path, and the parts of tensors that the plan does not take whole."""
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
        """RunError on all ranks unless this node's files equal the previous node's in all that one
        of its ranks has read.

        So every part that any rank has read is the same on two nodes at least.
        """
        store, (rank, _) = job_store(), c10d.place()
        assert self._taken is not None, "weights: nothing was noted"
        store.set(f"weights/{rank}", json.dumps([gethostname(), self._taken]))
        meet("weights", "")
        host, readings = json.loads(store.get(f"weights/{previous}"))
        store.delete_key(f"weights/{previous}")
        digests = {(tensor, f"{extent}"): digest for tensor, extent, digest in self._taken}
        other = f"rank {previous} on {host}"
        together(lambda: self._check_taken(readings, digests, other))

    def _check_taken(
        self, readings: Sequence[_Reading], digests: Mapping[tuple[str, str], str], other: str
    ) -> None:
        """RunError unless all parts that another rank has taken are the same here.

        `digests` are the hashes of the parts that this rank has read already.
        """
        for tensor, extent, digest in readings:
            digest_here = digests.get((tensor, f"{extent}"))
            if digest_here is None:
                part = tuple(slice(*stretch) for stretch in extent)
                digest_here = _hash(self._slice(tensor)[part])
            if digest_here != digest:
                rank, _ = c10d.place()
                raise RunError(
                    f"`{tensor}` of {self._path} differs between {other} and rank {rank} on"
                    f" {gethostname()}",
                    "the nodes have other files: give all of them the same revision",
                )

    def _part(self, name: str, spec: Spec, mesh: Mesh) -> Tensor:
        """This rank's part of a parameter; where experts have tensors of their own, it is made of
        the tensors of this rank's experts.
        """
        tensors, stored = self._places[name]
        if len(tensors) == 1:
            return _part(self._get_noting_slice(tensors[0]), stored, spec, mesh)
        rows, cut = spec.shape[0] // len(tensors), int(spec.shape[0] == len(tensors))
        first, count = (size // rows for size in (spec.offsets(mesh)[0], spec.local_shape(mesh)[0]))
        split = {dim - cut: axes for dim, axes in spec.split.items() if dim}
        expert_spec = Spec((rows, *spec.shape[1:])[cut:], split, spec.init)
        parts = list[Tensor]()
        for tensor in tensors[first : first + count]:
            parts.append(_part(self._get_noting_slice(tensor), stored, expert_spec, mesh))
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


def _open_files(path: Path) -> dict[str, Any]:
    """The tensors at a path, each with the open file that holds it."""
    package = safetensors()
    file_of: dict[str, Any] = {}
    for file in _files(path):
        if path.is_dir() and not (file.exists() or (path / INDEX).exists()):
            raise missing(path)
        size_of(file)
        try:
            opened = package.safe_open(file, framework="pt", device="cpu")
        except (OSError, package.SafetensorError) as error:
            raise unreadable(file, error) from None
        twice = file_of.keys() & opened.keys()
        if twice:
            raise RunError(f"{path}: more than one file has {quote_first_names(sorted(twice))}")
        file_of |= dict.fromkeys(opened.keys(), opened)
    return file_of


def _files(path: Path) -> list[Path]:
    """The files at a path."""
    index = path / INDEX
    if not index.exists():
        return [path / "model.safetensors" if path.is_dir() else path]
    data = index_of(index)
    try:
        names = sorted(set(json.loads(data)["weight_map"].values()))
        outside = [name for name in names if not is_within(name)]
    except DAMAGE:
        raise RunError(
            f"{index} is damaged, or no index of weights{describe_format(index)}"
        ) from None
    if outside:
        raise RunError(
            f"{index} names {quote_first_names(outside)}, which cannot be a file in its folder"
        )
    return [path / name for name in names]


def _part(view: Any, stored: HFWeight, spec: Spec, mesh: Mesh) -> Tensor:
    """Reads this rank's box of a parameter.

    A stored dim may be several of the parameter's dims as one.  The first of them says which
    stretch of the stored dim is read; the others are cut afterwards.
    """
    whole_shape = stored.rows(prod(spec.shape))
    offsets, sizes = list(spec.offsets(mesh)), spec.local_shape(mesh)
    stretches, shape = list[slice](), list[int]()
    for size, (first, *others) in zip(
        whole_shape, _group_dims(spec.shape, whole_shape), strict=True
    ):
        unit = size // spec.shape[first]
        start = offsets[first] * unit
        stretches.append(slice(start, start + sizes[first] * unit))
        shape += [sizes[first], *(spec.shape[dim] for dim in others)]
        offsets[first] = 0
    box = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
    return stored.halves(_rows(view, stored, *stretches)).reshape(shape)[box]


def _rows(view: Any, stored: HFWeight, rows: slice, *columns: slice) -> Tensor:
    """A stretch of a parameter's rows; rows after the tensor's last are padding, and 0."""
    end = stored.shape[-1 if stored.transposed else 0]
    start, stop = min(stored.start + rows.start, end), min(stored.start + rows.stop, end)
    wanted = (slice(start, stop), *columns)
    values = view[wanted[::-1]].T if stored.transposed else view[wanted]
    padding = values.new_zeros(rows.stop - rows.start - (stop - start), *values.shape[1:])
    if not len(padding):
        return values
    return torch.cat([values, padding])


def _group_dims(shape: tuple[int, ...], into: tuple[int, ...]) -> list[list[int]]:
    """The dims that make up each stored dim: (4, 16, 64) makes (64, 64) by [[0, 1], [2]]."""
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
