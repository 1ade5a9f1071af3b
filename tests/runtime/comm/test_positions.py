"""Positions against index arithmetic, for one axis and two, each contiguous or zigzag."""

from collections.abc import Iterator
from itertools import pairwise, product

import pytest
import torch

from helpers.ranks_alone import mesh_at
from scalec.runtime import Positions
from scalec.runtime.comm.positions import Cut, chunks, from_ranks, to_ranks

RANKS = range(1, 7)


def get_positions(size: int, cuts: tuple[Cut, ...]) -> list[int]:
    """The positions one by one, in the rank's order."""
    held = list(range(size))
    for ranks, rank, zigzag in cuts:
        each = len(held) // (2 * ranks if zigzag else ranks)
        pieces = [held[i : i + each] for i in range(0, len(held), each)]
        held = pieces[rank] + (pieces[2 * ranks - 1 - rank] if zigzag else [])
    return held


def _cuts() -> Iterator[tuple[int, tuple[Cut, ...]]]:
    """Sizes, and cuts of them by one axis and by two, of all ranks of each."""
    ways = [(ranks, zigzag) for ranks in RANKS for zigzag in (False, True)]
    for several in ([way] for way in ways), product(ways, ways):
        for cut in several:
            least = 1
            for ranks, zigzag in cut:
                least *= 2 * ranks if zigzag else ranks
            for size in range(least, 25, least):
                for own in product(*(range(ranks) for ranks, _ in cut)):
                    yield (
                        size,
                        tuple(
                            (n, rank, zigzag) for (n, zigzag), rank in zip(cut, own, strict=True)
                        ),
                    )


def test_chunks_are_those_of_index_arithmetic() -> None:
    number = 0
    for size, cuts in _cuts():
        held, runs = get_positions(size, cuts), chunks(size, cuts)
        assert [at for start, length in runs for at in range(start, start + length)] == held, (
            size,
            cuts,
        )
        assert all(length > 0 for _, length in runs)
        assert all(sum(one) != other[0] for one, other in pairwise(runs)), (size, cuts)
        number += 1
    assert number > 1000


@pytest.mark.parametrize("ranks", RANKS)
def test_pieces_of_all_ranks_in_their_order(ranks: int) -> None:
    held = [at for rank in range(ranks) for at in get_positions(2 * ranks, ((ranks, rank, True),))]
    assert list(to_ranks(ranks)) == held
    assert [held[piece] for piece in from_ranks(ranks)] == list(range(2 * ranks))


def test_positions_on_a_mesh() -> None:
    mesh = mesh_at(dp=(2, 1), cp=(2, 0), tp=(3, 1))
    positions = Positions(mesh, 48, "cp", "tp", zigzag=("cp",))
    held = get_positions(48, ((2, 0, True), (3, 1, False)))
    assert positions.size == 48
    assert positions.local == 8
    assert positions.chunks == ((8, 4), (36, 4))
    assert positions.indices(torch.device("cpu")).tolist() == held
    assert Positions(mesh, 48).chunks == ((0, 48),)


def test_a_size_that_no_rank_can_cut() -> None:
    with pytest.raises(AssertionError, match="12 cannot be cut"):
        Positions(mesh_at(cp=(4, 0)), 12, "cp", zigzag=["cp"])
