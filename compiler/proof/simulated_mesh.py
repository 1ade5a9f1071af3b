"""The ranks of a mesh, and what a coercion does to what they hold.

Each rank does to its own tensor what the runtime's collective does, right or wrong: copies that should agree
and do not are not made to agree.
"""

from collections.abc import Sequence
from functools import cached_property
from math import prod

import numpy as np
from attrs import frozen

from ..ir import Kind, Placement, Program, Type
from .tensors import Array, Dims, Numbers, Tensor

I, R, S, P, M = Kind.INVARIANT, Kind.REPLICATED, Kind.SHARDED, Kind.PARTIAL, Kind.MAXIMUM  # noqa: E741


@frozen(slots=False)
class SimulatedMesh:
    """The axes of a mesh, outermost first, and the global sizes of dims."""

    axes: dict[str, int]
    dims: dict[str, int]

    @classmethod
    def of(cls, program: Program) -> "SimulatedMesh":
        """The world of a program."""
        return cls({a.name: a.size for a in program.axes}, {d.name: d.size for d in program.dims})

    @cached_property
    def lead(self) -> tuple[int, ...]:
        """The mesh's shape."""
        return tuple(self.axes.values())

    @cached_property
    def _indices(self) -> dict[tuple[str, tuple[str, ...]], Array]:
        return {}

    def local(self, type: Type, dim: str) -> int:
        """How much of `dim` a rank holds of a value of `type`."""
        return self.dims[dim] // prod(self.axes[axis] for axis in type.axes_of(dim))

    def shape(self, type: Type) -> tuple[int, ...]:
        """The shape of a value of `type` on one rank."""
        return tuple(self.local(type, dim) for dim in type.dims)

    def indices(self, type: Type, dim: str) -> Array:
        """The global indices along `dim` of what each rank holds of a value of `type`: [1, *mesh axes, n]."""
        axes = type.axes_of(dim)
        if (dim, axes) not in self._indices:
            every = Tensor((dim,), np.arange(self.dims[dim]).reshape(1, *(1,) * len(self.axes), -1))
            places = tuple((axis, place) for axis, place in type.places if axis in axes)
            self._indices[dim, axes] = self.spread(every, Type("i64", (dim,), places)).array
        return self._indices[dim, axes]

    def spread(self, value: Tensor, type: Type) -> Tensor:
        """Each rank's part of a global value, [trials, 1 …, *dims], placed as `type`; a sum is all on rank 0."""
        array = value.onto(type.dims)
        for i, (axis, size) in enumerate(self.axes.items()):
            array = np.moveaxis(array, 1 + i, 0)[0]
            array = np.moveaxis(_shares(array, type.at(axis), size, _from_end(type.dims, type.at(axis))), 0, 1 + i)
        return Tensor(type.dims, array, value.degree)

    def coerced(
        self,
        x: Tensor,
        axes: Sequence[str],
        source: Placement,
        target: Placement,
        n: Numbers,
        among: Sequence[int] = (),
    ) -> Tensor:
        """Each rank's value after a coercion over the joint group of `axes`.

        A sum may be `among` some ranks of one axis; the others keep what they hold.
        """
        if among:
            here = self.among(axes[0], among, x.dims)
            part = Tensor(x.dims, np.where(here, x.array, np.zeros_like(x.array)), x.degree)
            whole = self.coerced(part, axes, source, target, n)
            return Tensor(x.dims, np.where(here, whole.array, x.array), x.degree)
        order = [1 + list(self.axes).index(axis) for axis in axes]
        sizes = [self.axes[axis] for axis in axes]
        array = np.moveaxis(self._full(x, order), order, range(len(order)))
        parts = Tensor(x.dims, array.reshape(prod(sizes), *array.shape[len(sizes) :]), x.degree)
        array = _changed(parts, source, target, n)
        array = np.moveaxis(array.reshape(*sizes, *array.shape[1:]), range(len(order)), order)
        return Tensor(x.dims, array, x.degree)

    def among(self, axis: str, ranks: Sequence[int], dims: Dims) -> Array:
        """Whether a rank is one of some of an axis, for a value of `dims`: [1, *mesh axes, 1 …]."""
        found = np.isin(np.arange(self.axes[axis]), ranks)
        return found.reshape(1, *(size if name == axis else 1 for name, size in self.axes.items()), *(1,) * len(dims))

    def _full(self, x: Tensor, order: Sequence[int]) -> Array:
        """The array with every rank's part along the mesh axes of `order`."""
        shape = list(x.array.shape)
        for at in order:
            shape[at] = self.lead[at - 1]
        return np.broadcast_to(x.array, shape)


def _from_end(dims: Dims, place: Placement) -> int:
    return dims.index(place.dim) - len(dims) if place.kind is S else 0


def _shares(array: Array, place: Placement, ranks: int, at: int) -> Array:
    match place.kind:
        case Kind.SHARDED:
            return np.stack(np.split(array, ranks, axis=at))
        case Kind.PARTIAL:
            return np.stack([array, *[np.zeros_like(array)] * (ranks - 1)])
        case _:
            return np.broadcast_to(array, (ranks, *array.shape))


def _changed(x: Tensor, source: Placement, target: Placement, n: Numbers) -> Array:
    """The parts of the ranks of a group, [ranks, …], after source → target."""
    parts, ranks = x.array, len(x.array)
    match source.kind, target.kind:
        case (Kind.PARTIAL, Kind.INVARIANT):
            return _everywhere(_sum(x, n), ranks)
        case (Kind.PARTIAL, Kind.SHARDED):
            return np.stack(np.split(_sum(x, n), ranks, axis=_from_end(x.dims, target)))
        case (Kind.SHARDED, Kind.REPLICATED | Kind.INVARIANT):
            return _everywhere(np.concatenate(list(parts), axis=_from_end(x.dims, source)), ranks)
        case (Kind.SHARDED, Kind.SHARDED):
            whole = np.concatenate(list(parts), axis=_from_end(x.dims, source))
            return np.stack(np.split(whole, ranks, axis=_from_end(x.dims, target)))
        case (Kind.INVARIANT | Kind.REPLICATED, Kind.SHARDED):
            at = _from_end(x.dims, target)
            return np.stack([np.split(part, ranks, axis=at)[i] for i, part in enumerate(parts)])
        case (Kind.SHARDED, Kind.PARTIAL):
            return _padded(parts, _from_end(x.dims, source))
        case (Kind.INVARIANT | Kind.REPLICATED, Kind.PARTIAL):
            return np.concatenate([parts[:1], np.zeros_like(parts[1:])])
        case (Kind.MAXIMUM, _):
            return _everywhere(_largest(x, n), ranks)
        case _:
            return parts


def _everywhere(array: Array, ranks: int) -> Array:
    return np.broadcast_to(array, (ranks, *array.shape))


def _sum(x: Tensor, n: Numbers) -> Array:
    """The sum over ranks; integers, which are counts, stay integers."""
    if x.array.dtype.kind == "i":
        return x.array.sum(axis=0)
    return n.total(x.dims, *(Tensor(x.dims, part) for part in x.array)).array


def _largest(x: Tensor, n: Numbers) -> Array:
    parts, keys = np.broadcast_arrays(x.array, np.stack([n.rank(Tensor(x.dims, part)) for part in x.array]))
    return np.take_along_axis(parts, keys.argmax(axis=0)[None], axis=0)[0]


def _padded(parts: Array, at: int) -> Array:
    """Each rank's part in its place among zeros."""
    zero = np.zeros_like(parts[0])
    rows = [[part if i == rank else zero for i in range(len(parts))] for rank, part in enumerate(parts)]
    return np.stack([np.concatenate(row, axis=at) for row in rows])
