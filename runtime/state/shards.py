"""Boxes: parts of tensors by where they lie in the whole, in which a state is saved and loaded on any mesh.

Non-goals: no files, no ranks: whoever holds a box says where it lies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a part lies in a whole tensor: its first index and its size along each dim."""

    offset: Shape
    size: Shape

    def overlap(self, other: "Extent") -> "Extent | None":
        """The part in both; None if there is none."""
        starts = tuple(map(max, self.offset, other.offset))
        stops = tuple(map(min, self.stop, other.stop))
        size = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Extent(starts, size) if all(each > 0 for each in size) else None

    @property
    def stop(self) -> Shape:
        """One past its last index along each dim."""
        return tuple(start + size for start, size in zip(self.offset, self.size, strict=True))

    def within(self, outer: "Extent") -> tuple[slice, ...]:
        """This part as slices of a tensor that holds `outer`."""
        starts = [a - b for a, b in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.size, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{start}:{stop}" for start, stop in zip(self.offset, self.stop, strict=True)) + "]"


@dataclass(frozen=True, eq=False, slots=True)
class Box:
    """This rank's part of the tensor `key` of the global `shape`; `own` on one of the ranks that hold the same part."""

    key: str
    shape: Shape
    offset: Shape
    tensor: Tensor
    own: bool

    @property
    def extent(self) -> Extent:
        """Where it lies."""
        return Extent(self.offset, tuple(self.tensor.shape))


def whole(shape: Shape) -> Extent:
    """All of a tensor."""
    return Extent((0,) * len(shape), shape)


def fault(shape: Shape, extents: Sequence[Extent]) -> str:
    """Why the extents are not one tensor cut into parts: one sticks out, two overlap, a gap; empty if they are."""
    for extent in extents:
        if any(stop > size for stop, size in zip(extent.stop, shape, strict=True)):
            return f"its part {extent} lies outside of {list(shape)}"
    if clash := _clash(shape, extents):
        return f"its parts {clash[0]} and {clash[1]} overlap"
    missing = prod(shape) - sum(prod(extent.size) for extent in extents)
    return f"{missing} of its {prod(shape)} elements are in no part" if missing else ""


def _clash(shape: Shape, extents: Sequence[Extent]) -> tuple[Extent, Extent] | None:
    """Two that overlap.  Along the dim that is cut most, so that few are ever looked at together."""
    if not shape:
        return next(pairwise(extents), None)
    dim = max(range(len(shape)), key=lambda dim: len({extent.offset[dim] for extent in extents}))
    open_: list[Extent] = []
    for extent in sorted(extents, key=lambda extent: extent.offset[dim]):
        open_ = [other for other in open_ if other.stop[dim] > extent.offset[dim]]
        if other := next((other for other in open_ if other.overlap(extent)), None):
            return other, extent
        open_.append(extent)
    return None
