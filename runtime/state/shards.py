"""Boxes: parts of tensors, by where they lie in the whole.  A state is saved and loaded as boxes,
on any mesh.

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
        if any(length <= 0 for length in size):
            return None
        return Extent(starts, size)

    @property
    def stop(self) -> Shape:
        """One past its last index along each dim."""
        return tuple(start + size for start, size in zip(self.offset, self.size, strict=True))

    def within(self, outer: "Extent") -> tuple[slice, ...]:
        """This part as slices of a tensor that holds `outer`."""
        slices = list[slice]()
        for offset, outer_offset, size in zip(self.offset, outer.offset, self.size, strict=True):
            start = offset - outer_offset
            slices.append(slice(start, start + size))
        return tuple(slices)

    def __str__(self) -> str:
        ranges = zip(self.offset, self.stop, strict=True)
        return f"[{', '.join(f'{start}:{stop}' for start, stop in ranges)}]"


@dataclass(frozen=True, eq=False, slots=True)
class Box:
    """This rank's part of the tensor `key` of the global `shape`; `own` on one of the ranks
    that hold the same part.
    """

    key: str
    shape: Shape
    offset: Shape
    tensor: Tensor
    is_own: bool

    @property
    def extent(self) -> Extent:
        """Where the box lies in the tensor."""
        return Extent(self.offset, tuple(self.tensor.shape))

    @property
    def name(self) -> str:
        """The key; for a part with its place, as in `wq[0:4, 8:16]`."""
        if self.extent == whole(self.shape):
            return self.key
        return f"{self.key}{self.extent}"


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

    def get_view(self, part: Tensor) -> Tensor:
        """These elements, a view in the other shape."""
        return part[self.within].view(self.extent.size)

    def along(self, part: slice, box: Extent) -> "Piece":
        """This piece with one more dim: `part` of this dim here, `box` of it in the other shape."""
        extent = Extent((*self.extent.offset, *box.offset), (*self.extent.size, *box.size))
        return Piece((*self.within, part), extent)


def common_shape(one: Shape, other: Shape) -> Shape | None:
    """The longer of two shapes where the other joins some of its neighbouring dims; None where
    the shapes do not agree.

    A matrix of each expert is stored in two dims, (experts · out, in), or in three where ranks have
    parts of each.
    """
    short, long = sorted((one, other), key=len)
    if len(short) == len(long) or len(short) < 2:
        return one if one == other else None
    if prod(short) == prod(long) and {*accumulate(short, mul)} <= {*accumulate(long, mul)}:
        return long
    return None


def pieces(extent: Extent, shape: Shape, common: Shape) -> list[Piece]:
    """A part of a tensor of `shape` as parts of the same tensor in its `common_shape` with
    another.
    """
    if shape == common:
        return [Piece((), extent)]
    parts = [Piece((), Extent((), ()))]
    for start, stop, sizes in zip(extent.offset, extent.stop, _dims_of(shape, common), strict=True):
        boxes = [*_boxes(start, stop, sizes)]
        longer = list[Piece]()
        for part in parts:
            for a, b, box in boxes:
                longer.append(part.along(slice(a - start, b - start), box))
        parts = longer
    return parts


def _dims_of(shape: Shape, common: Shape) -> list[Shape]:
    """For each dim of `shape`, the dims of the common shape that it joins."""
    remaining, groups = [*common], list[list[int]]()
    for size in shape:
        groups.append([remaining.pop(0)])
        while prod(groups[-1]) < size:
            groups[-1].append(remaining.pop(0))
    return [*map(tuple, groups[:-1]), (*groups[-1], *remaining)]


def _boxes(start: int, stop: int, sizes: Shape) -> Iterator[tuple[int, int, Extent]]:
    """The stretch from `start` to `stop` along joined dims of these sizes, cut into boxes: the
    stretch of each, and the box.
    """
    row = prod(sizes[1:])
    # cut at the ends of whole rows, so that these are one box
    cuts = {start, stop}
    for cut in (-(-start // row) * row, stop // row * row):
        if start < cut < stop:
            cuts.add(cut)
    for a, b in pairwise(sorted(cuts)):
        index, before = divmod(a, row)
        if before or b % row:
            for c, d, box in _boxes(before, before + b - a, sizes[1:]):
                extent = Extent((index, *box.offset), (1, *box.size))
                yield index * row + c, index * row + d, extent
        else:
            zeros = (0,) * len(sizes[1:])
            yield a, b, Extent((index, *zeros), ((b - a) // row, *sizes[1:]))


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
    if missing:
        return f"{missing} of its {prod(shape)} elements are in no part"
    return ""


def _clash(shape: Shape, extents: Sequence[Extent]) -> tuple[Extent, Extent] | None:
    """Two extents that overlap, if any do.

    It sweeps along the dim that is cut most, so that few extents are ever compared with each other.
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
