"""Boxes: parts of tensors by where they lie in the whole, in which a state is saved and loaded on
any mesh.

Non-goals: no files, no ranks: whoever holds a box says where it lies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from operator import mul

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
        return tuple(
            slice(start, start + size) for start, size in zip(starts, self.size, strict=True)
        )

    def __str__(self) -> str:
        return (
            "["
            + ", ".join(
                f"{start}:{stop}" for start, stop in zip(self.offset, self.stop, strict=True)
            )
            + "]"
        )


@dataclass(frozen=True, eq=False, slots=True)
class Box:
    """This rank's part of the tensor `key` of the global `shape`; `own` on one of the ranks
    that hold the same part.
    """

    key: str
    shape: Shape
    offset: Shape
    tensor: Tensor
    own: bool

    @property
    def extent(self) -> Extent:
        """Where it lies."""
        return Extent(self.offset, tuple(self.tensor.shape))

    @property
    def name(self) -> str:
        """The key; for a part with its place, as in `wq[0:4, 8:16]`."""
        return self.key if self.extent == whole(self.shape) else f"{self.key}{self.extent}"


def whole(shape: Shape) -> Extent:
    """All of a tensor."""
    return Extent((0,) * len(shape), shape)


@dataclass(frozen=True, slots=True)
class Piece:
    """Some elements of a part, as slices of it, and where they lie in the whole of another
    shape.
    """

    within: tuple[slice, ...]
    extent: Extent

    def of(self, part: Tensor) -> Tensor:
        """These elements, a view in the other shape."""
        return part[self.within].view(self.extent.size)

    def along(self, part: slice, box: Extent) -> "Piece":
        """With one dim more, of which it is this part, and which in the other shape is this box."""
        extent = Extent((*self.extent.offset, *box.offset), (*self.extent.size, *box.size))
        return Piece((*self.within, part), extent)


def common_shape(one: Shape, other: Shape) -> Shape | None:
    """The longer of two shapes where the other has some neighbouring dims of it as one; None where
    they are at odds.

    A matrix of each expert is stored in two dims, (experts · out, in), or in three where ranks have
    parts of each.
    """
    short, long = sorted((one, other), key=len)
    if len(short) == len(long) or len(short) < 2:
        return one if one == other else None
    return (
        long
        if prod(short) == prod(long) and {*accumulate(short, mul)} <= {*accumulate(long, mul)}
        else None
    )


def pieces(extent: Extent, shape: Shape, common: Shape) -> list[Piece]:
    """A part of a tensor of `shape` as parts of the same tensor in its `common_shape` with
    another.
    """
    if shape == common:
        return [Piece((), extent)]
    found = [Piece((), Extent((), ()))]
    for start, stop, sizes in zip(extent.offset, extent.stop, _dims_of(shape, common), strict=True):
        found = [
            each.along(slice(a - start, b - start), box)
            for each in found
            for a, b, box in _boxes(start, stop, sizes)
        ]
    return found


def _dims_of(shape: Shape, common: Shape) -> list[Shape]:
    """The dims of the common shape that each dim is."""
    rest, groups = [*common], list[list[int]]()
    for size in shape:
        groups.append([rest.pop(0)])
        while prod(groups[-1]) < size:
            groups[-1].append(rest.pop(0))
    return [*map(tuple, groups[:-1]), (*groups[-1], *rest)]


def _boxes(start: int, stop: int, sizes: Shape) -> Iterator[tuple[int, int, Extent]]:
    """The stretch from `start` to `stop` along dims as one, cut into boxes of these dims: each
    with its own stretch.
    """
    row = prod(sizes[1:])
    whole_rows = (at for at in (-(-start // row) * row, stop // row * row) if start < at < stop)
    for a, b in pairwise(sorted({start, *whole_rows, stop})):
        at, before = divmod(a, row)
        if before or b % row:
            for c, d, box in _boxes(before, before + b - a, sizes[1:]):
                yield at * row + c, at * row + d, Extent((at, *box.offset), (1, *box.size))
        else:
            yield a, b, Extent((at, *(0 for _ in sizes[1:])), ((b - a) // row, *sizes[1:]))


def fault(shape: Shape, extents: Sequence[Extent]) -> str:
    """Why the extents are not one tensor cut into parts: one sticks out, two overlap, a gap;
    empty if they are.
    """
    for extent in extents:
        outside = [
            start < 0 or stop > size
            for start, stop, size in zip(extent.offset, extent.stop, shape, strict=True)
        ]
        if any(outside):
            return f"its part {extent} lies outside of {list(shape)}"
    if clash := _clash(shape, extents):
        return f"its parts {clash[0]} and {clash[1]} overlap"
    missing = prod(shape) - sum(prod(extent.size) for extent in extents)
    return f"{missing} of its {prod(shape)} elements are in no part" if missing else ""


def _clash(shape: Shape, extents: Sequence[Extent]) -> tuple[Extent, Extent] | None:
    """Two that overlap.

    Along the dim that is cut most, so that few are ever looked at together.
    """
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
