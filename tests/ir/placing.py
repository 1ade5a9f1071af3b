"""What placements mean: from a global value to what the ranks of a mesh hold, and back.

Purpose: the reference that the compiler's table of coercions is held against; it shares nothing with that table.
Non-goals: ops (`meanings`), programs (`simulate`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from scalec.compiler.ir import INVARIANT, REPLICATED, Kind, Placement, Program, Type, sharded

Array = NDArray[Any]

TOLERANCE = 1e-9
"""How far copies of one value may be apart; they are computed alike, but not always in the same order."""


@frozen
class Held:
    """What all ranks hold of a value: its leading dims are the mesh's axes, the others the local ones of `type`."""

    type: Type
    parts: Array


def joined(parts: Array, place: Placement, at: int) -> Array:
    """The value whose share rank i of a group holds in `parts[i]`; `at` is the place of a sharded dim, from the end."""
    match place.kind:
        case Kind.SHARDED:
            return np.concatenate(list(parts), axis=at)
        case Kind.PARTIAL:
            return parts.sum(axis=0)
        case Kind.MAXIMUM:
            return parts.max(axis=0)
        case _:
            assert np.abs(parts - parts[:1]).max(initial=0) <= TOLERANCE * (1 + np.abs(parts).max(initial=0)), (
                f"the copies of a value placed {place} differ"
            )
            return parts[0]


def shared(value: Array, place: Placement, ranks: int, at: int, rng: np.random.Generator | None = None) -> Array:
    """The shares of `value` in a group; a sum is all on its first rank, or random integers spread it with `rng`."""
    match place.kind:
        case Kind.SHARDED:
            return np.stack(np.split(value, ranks, axis=at))
        case Kind.PARTIAL:
            noise = rng.integers(-3, 4, (ranks - 1, *value.shape)) if rng else np.zeros((ranks - 1, *value.shape), int)
            return np.concatenate([[value - noise.sum(axis=0)], noise]).astype(value.dtype)
        case _:
            return np.stack([value] * ranks)


def padded(parts: Array, at: int) -> Array:
    """Each rank's share in its place among zeros."""
    zero = np.zeros_like(parts)
    rows = [[part if i == rank else zero[0] for i, part in enumerate(parts)] for rank in range(len(parts))]
    return np.stack([np.concatenate(row, axis=at) for row in rows])


@frozen
class Mesh:
    """The axes of a mesh, outermost first, and the sizes of the dims that lie over it."""

    axes: Mapping[str, int]
    dims: Mapping[str, int]

    @classmethod
    def of(cls, program: Program) -> "Mesh":
        """The mesh of a program."""
        return cls({a.name: a.size for a in program.axes}, {d.name: d.size for d in program.dims})

    def spread(self, value: Array, type: Type, rng: np.random.Generator | None = None) -> Held:
        """What each rank holds of a global value; copies are made last, so that they are of the same shares."""
        for i, (axis, ranks) in enumerate(self.axes.items()):
            place = type.at(axis)
            distinct = 1 if place in (INVARIANT, REPLICATED) else ranks
            value = np.moveaxis(shared(value, place, distinct, _from_end(type, place), rng), 0, i)
        return Held(type, np.broadcast_to(value, (*self.axes.values(), *value.shape[len(self.axes) :])))

    def whole(self, held: Held) -> Array:
        """The global value; asserts that copies agree."""
        parts = held.parts
        for i, axis in reversed(list(enumerate(self.axes))):
            place = held.type.at(axis)
            parts = joined(np.moveaxis(parts, i, 0), place, _from_end(held.type, place))
        return parts

    def coerced(self, held: Held, axes: Sequence[str], source: Placement, target: Placement) -> Held:
        """The same value with another placement over the joint group of `axes`."""
        order = [list(self.axes).index(axis) for axis in axes]
        sizes = [self.axes[axis] for axis in axes]
        parts = np.moveaxis(held.parts, order, range(len(order)))
        parts = parts.reshape(math.prod(sizes), *parts.shape[len(sizes) :])
        if (source.kind, target.kind) == (Kind.SHARDED, Kind.PARTIAL):
            parts = padded(parts, _from_end(held.type, source))
        else:
            value = joined(parts, source, _from_end(held.type, source))
            parts = shared(value, target, len(parts), _from_end(held.type, target))
        parts = np.moveaxis(parts.reshape(*sizes, *parts.shape[1:]), range(len(order)), order)
        at = dict(held.type.places) | dict.fromkeys(axes, target)
        places = tuple((axis, at[axis]) for axis in self.axes if at.get(axis, INVARIANT) != INVARIANT)
        return Held(Type(held.type.dtype, held.type.dims, places), parts)

    def indices(self, type: Type, dim: str) -> Array:
        """The global indices along `dim` of what each rank holds of a value of `type`."""
        places = tuple((axis, place) for axis, place in type.places if place == sharded(dim))
        return self.spread(np.arange(self.dims[dim]), Type("i64", (dim,), places)).parts

    def check(self, held: Held) -> None:
        """Asserts that the shape is that of the type, and that copies agree."""
        assert held.parts.shape[: len(self.axes)] == tuple(self.axes.values()), "not one part for each rank"
        local = tuple(self.indices(held.type, dim).shape[-1] for dim in held.type.dims)
        assert held.parts.shape[len(self.axes) :] == local, f"{held.parts.shape} is not the local shape of {held.type}"
        for i, axis in enumerate(self.axes):
            if held.type.at(axis).kind in (Kind.INVARIANT, Kind.REPLICATED):
                joined(np.moveaxis(held.parts, i, 0), held.type.at(axis), 0)


def _from_end(type: Type, place: Placement) -> int:
    return type.dims.index(place.dim) - len(type.dims) if place.kind is Kind.SHARDED else 0
