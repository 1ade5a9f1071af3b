"""Boxes: overlaps against masks of the whole, and cuts that are the whole or are not."""

import random
from math import prod

import pytest
import torch

from scalec.runtime.state.shards import Extent, Shape, common_shape, fault, pieces, whole

SHAPE = (4, 5, 3)


JOINED = [
    ((12, 5), (4, 3, 5)),  # [experts · out, in], [experts, out, in]
    ((4, 15), (4, 3, 5)),
    ((8, 15), (4, 2, 3, 5)),
    ((24, 5), (2, 3, 4, 5)),
    ((6, 20), (1, 6, 1, 4, 5)),
    ((6, 4), (6, 4)),
]


def _cut(extent: Extent, draw: random.Random, times: int) -> list[Extent]:
    """Cuts an extent in two, and each half again."""
    dims = [dim for dim, size in enumerate(extent.size) if size > 1]
    if not times or not dims:
        return [extent]
    dim = draw.choice(dims)
    first = draw.randrange(1, extent.size[dim])
    sizes = [
        (*extent.size[:dim], size, *extent.size[dim + 1 :])
        for size in (first, extent.size[dim] - first)
    ]
    second = (*extent.offset[:dim], extent.offset[dim] + first, *extent.offset[dim + 1 :])
    return [
        part
        for half in (Extent(extent.offset, sizes[0]), Extent(second, sizes[1]))
        for part in _cut(half, draw, times - 1)
    ]


def _mask(extent: Extent) -> torch.Tensor:
    mask = torch.zeros(SHAPE, dtype=torch.bool)
    mask[extent.within(whole(SHAPE))] = True
    return mask


def test_what_is_cut_is_whole_and_with_any_part_less_or_twice_is_not() -> None:
    for seed in range(50):
        parts = _cut(whole(SHAPE), random.Random(seed), 3)
        assert fault(SHAPE, parts) == ""
        for part in parts:
            assert fault(SHAPE, [other for other in parts if other is not part]).endswith(
                "are in no part"
            )
            assert fault(SHAPE, [*parts, part]).endswith("overlap")
        bigger = (SHAPE[0] + 1, *SHAPE[1:])
        assert fault(bigger, parts) == "15 of its 75 elements are in no part"
        assert "lies outside of" in fault((SHAPE[0] - 1, *SHAPE[1:]), parts)


def test_overlaps_are_those_of_masks() -> None:
    for seed in range(50):
        ours, theirs = (_cut(whole(SHAPE), random.Random(seed + shift), 3) for shift in (0, 1000))
        for one in ours:
            for other in theirs:
                shared, both = one.overlap(other), _mask(one) & _mask(other)
                assert torch.equal(_mask(shared), both) if shared else not both.any()


def test_a_scalar_has_one_part() -> None:
    (part,) = _cut(whole(()), random.Random(0), 3)
    assert "lies outside of" in fault(
        (3,), [Extent((-1,), (2,)), Extent((1,), (1,)), Extent((3,), (0,))]
    )
    assert fault((), [part]) == ""
    assert fault((), []) == "1 of its 1 elements are in no part"
    assert fault((), [part, part]).endswith("overlap")


@pytest.mark.parametrize(("shape", "common"), JOINED)
def test_parts_are_the_same_elements_in_another_shape(shape: Shape, common: Shape) -> None:
    assert common_shape(shape, common) == common_shape(common, shape) == common
    numbers, found = torch.arange(prod(shape)).view(shape), torch.full(common, -1)
    for seed in range(50):
        found.fill_(-1)
        for part in _cut(whole(shape), random.Random(seed), 3):
            own = numbers[part.within(whole(shape))].clone()
            for piece in pieces(part, shape, common):
                found[piece.extent.within(whole(common))] = piece.get_view(own)
        assert torch.equal(found, numbers.view(common))


@pytest.mark.parametrize(
    "other", [(4, 15), (5, 12), (5, 3, 4), (60,), (6, 5), (3, 5), (4, 3, 5, 2), (4, 3, 5, 0), ()]
)
def test_shapes_are_at_odds(other: Shape) -> None:
    """Even where there are as many elements."""
    assert common_shape((12, 5), other) is None
    assert common_shape(other, (12, 5)) is None
