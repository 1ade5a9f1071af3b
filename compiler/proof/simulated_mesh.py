"""The ranks of a mesh, and the effect of a coercion on the tensors that they hold.
Each rank does to its own tensor what the runtime's collective does, right or wrong: copies that
should agree and do not are not made to agree.
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
    """The axes of a mesh, outermost first; the global sizes of dims; and the dims and axes whose
    ranks hold two chunks each.
    """

    axes: dict[str, int]
    dims: dict[str, int]
    zigzags: frozenset[tuple[str, str]] = frozenset()

    @classmethod
    def of_program(cls, program: Program) -> "SimulatedMesh":
        """The world of a program."""
        axes = {axis.name: axis.size for axis in program.axes}
        dims = {dim.name: dim.size for dim in program.dims}
        return cls(axes, dims, program.zigzags)

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
        """The global indices along `dim` of what each rank holds of a value of `type`: [1,
        *mesh axes, n].
        """
        axes = type.axes_of(dim)
        if (dim, axes) not in self._indices:
            every = Tensor((dim,), np.arange(self.dims[dim]).reshape(1, *(1,) * len(self.axes), -1))
            places = tuple((axis, place) for axis, place in type.places if axis in axes)
            self._indices[dim, axes] = self.spread(every, Type("i64", (dim,), places)).array
        return self._indices[dim, axes]

    def spread(self, value: Tensor, type: Type) -> Tensor:
        """Each rank's part of a global value, [trials, 1 …, *dims], placed as `type`; a sum is
        all on rank 0.
        """
        array = value.onto(type.dims)
        order = [*self.axes]
        for axis in sorted(order, key=lambda axis: type.placement_on(axis).level):
            i, size, place = order.index(axis), self.axes[axis], type.placement_on(axis)
            array = np.moveaxis(array, 1 + i, 0)[0]
            index = _from_end(type.dims, place)
            if place.kind is S:
                shares = self._cut(array, place.dim, [axis], index)
            elif place.kind is P:
                shares = np.stack([array, *[np.zeros_like(array)] * (size - 1)])
            else:
                shares = _everywhere(array, size)
            array = np.moveaxis(shares, 0, 1 + i)
        return Tensor(type.dims, array, value.degree)

    def _order(self, dim: str, axes: Sequence[str], size: int) -> list[Array] | None:
        """The positions of `size` that each rank of a joint group holds; None where each holds one
        part, in order.

        Rank r of n holds chunks r and 2n - 1 - r of 2n of the positions that the ranks of outer
        axes hold together, in their order.
        """
        if not any((dim, axis) in self.zigzags for axis in axes):
            return None
        rows = [np.arange(size)]
        for axis in axes:
            ranks = self.axes[axis]
            finer = list[Array]()
            for row in rows:
                if (dim, axis) in self.zigzags:
                    chunks = np.split(row, 2 * ranks)
                    finer += [np.concatenate([chunks[r], chunks[-1 - r]]) for r in range(ranks)]
                else:
                    finer += np.split(row, ranks)
            rows = finer
        return rows

    def _parts(self, whole: Array, dim: str, axes: Sequence[str], index: int) -> list[Array]:
        """Each rank's part of `dim`, the array's axis `index`, of a whole."""
        order = self._order(dim, axes, whole.shape[index])
        if order is None:
            return np.split(whole, prod(self.axes[axis] for axis in axes), axis=index)
        return [np.take(whole, row, axis=index) for row in order]

    def _cut(self, whole: Array, dim: str, axes: Sequence[str], index: int) -> Array:
        """The parts as one array, [ranks, …]."""
        return np.stack(self._parts(whole, dim, axes, index))

    def _join_parts(
        self, parts: Sequence[Array], dim: str, axes: Sequence[str], index: int
    ) -> Array:
        """The whole of the parts that ranks hold."""
        whole = np.concatenate([*parts], axis=index)
        order = self._order(dim, axes, whole.shape[index])
        if order is None:
            return whole
        return np.take(whole, np.argsort(np.concatenate(order)), axis=index)

    def _among_zeros(self, parts: Array, dim: str, axes: Sequence[str], index: int) -> Array:
        """Each rank's part in its place of the whole, which is 0 elsewhere: [ranks, …]."""
        shape, size = list(parts[0].shape), parts.shape[index]
        shape[index] *= len(parts)
        wholes = np.zeros((len(parts), *shape), parts.dtype)
        rows = self._order(dim, axes, shape[index])
        if rows is None:
            rows = [slice(i * size, (i + 1) * size) for i in range(len(parts))]
        for whole, part, row in zip(wholes, parts, rows, strict=True):
            np.moveaxis(whole, index, 0)[row] = np.moveaxis(part, index, 0)
        return wholes

    def coerce(
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
            whole = self.coerce(part, axes, source, target, n)
            return Tensor(x.dims, np.where(here, whole.array, x.array), x.degree)
        order = [1 + list(self.axes).index(axis) for axis in axes]
        sizes = [self.axes[axis] for axis in axes]
        full = self._full(x, order)
        array = np.moveaxis(self._once(full, order), order, range(len(order)))
        parts = Tensor(x.dims, array.reshape(prod(sizes), *array.shape[len(sizes) :]), x.degree)
        array = self._change_placement(parts, axes, source, target, n)
        if array.strides[0] == 0:  # alike on all ranks of the group
            array, sizes = array[:1], [1] * len(sizes)
        array = np.moveaxis(array.reshape(*sizes, *array.shape[1:]), range(len(order)), order)
        # kinds of numbers lead the mesh
        shape = (array.shape[0], *full.shape[1 : x.lead], *array.shape[x.lead :])
        if array.shape != shape:
            array = np.broadcast_to(array, shape)
        return Tensor(x.dims, array, x.degree)

    def _once(self, array: Array, order: Sequence[int]) -> Array:
        """The array, cut to one entry along each mesh axis that repeats it, except the axes of
        `order`.
        """
        count = 1 + len(self.axes)
        repeated = [
            axis for axis in range(1, count) if axis not in order and array.strides[axis] == 0
        ]
        if not repeated:
            return array
        index = [slice(1) if axis in repeated else slice(None) for axis in range(count)]
        return array[tuple(index)]

    def _change_placement(
        self, x: Tensor, axes: Sequence[str], source: Placement, target: Placement, n: Numbers
    ) -> Array:
        """The parts of the ranks of a group, [ranks, …], after source → target."""
        parts, ranks = x.array, len(x.array)
        place = source if source.kind is S else target
        dim, index = place.dim, _from_end(x.dims, place)
        match source.kind, target.kind:
            case (Kind.PARTIAL, Kind.INVARIANT):
                return _everywhere(_sum(x, n), ranks)
            case (Kind.PARTIAL, Kind.SHARDED):
                return self._cut(_sum(x, n), dim, axes, index)
            case (Kind.SHARDED, Kind.REPLICATED | Kind.INVARIANT):
                return _everywhere(self._join_parts([*parts], dim, axes, index), ranks)
            case (Kind.SHARDED, Kind.SHARDED):
                whole = self._join_parts([*parts], dim, axes, index)
                return self._cut(whole, target.dim, axes, _from_end(x.dims, target))
            case (Kind.INVARIANT | Kind.REPLICATED, Kind.SHARDED):
                shards = [
                    self._parts(part, dim, axes, index)[rank] for rank, part in enumerate(parts)
                ]
                return np.stack(shards)
            case (Kind.SHARDED, Kind.PARTIAL):
                return self._among_zeros(parts, dim, axes, index)
            case (Kind.INVARIANT | Kind.REPLICATED, Kind.PARTIAL):
                return np.concatenate([parts[:1], np.zeros_like(parts[1:])])
            case (Kind.MAXIMUM, _):
                return _everywhere(_largest(x, n), ranks)
            case _:
                return parts

    def among(self, axis: str, ranks: Sequence[int], dims: Dims) -> Array:
        """Whether a rank is one of some of an axis, for a value of `dims`: [1, *mesh axes, 1 …]."""
        is_among = np.isin(np.arange(self.axes[axis]), ranks)
        mesh = (size if name == axis else 1 for name, size in self.axes.items())
        return is_among.reshape(1, *mesh, *(1,) * len(dims))

    def _full(self, x: Tensor, order: Sequence[int]) -> Array:
        """The array with every rank's part along the mesh axes of `order`."""
        shape = list(x.array.shape)
        for index in order:
            shape[index] = self.lead[index - 1]
        return np.broadcast_to(x.array, shape)


def _from_end(dims: Dims, place: Placement) -> int:
    if place.kind is not S:
        return 0
    return dims.index(place.dim) - len(dims)


def _everywhere(array: Array, ranks: int) -> Array:
    return np.broadcast_to(array, (ranks, *array.shape))


def _sum(x: Tensor, n: Numbers) -> Array:
    """The sum over ranks; integers, which are counts, stay integers."""
    if x.array.dtype.kind == "i":
        return x.array.sum(axis=0)
    return n.total(x.dims, *(Tensor(x.dims, part) for part in x.array)).array


def _largest(x: Tensor, n: Numbers) -> Array:
    keys_of_parts = [n.rank(Tensor(x.dims, part)) for part in x.array]
    parts, keys = np.broadcast_arrays(x.array, np.stack(keys_of_parts))
    return np.take_along_axis(parts, keys.argmax(axis=0)[None], axis=0)[0]
