"""Made schedules against the least time that a solver proves: equal in all small cases, and by how
much not in larger.

Small is what the search goes through without dropping anything that could be better: 2 and 3 ranks,
1 and 2 stages on each, 1 to 4 microbatches.
"""

import random
from collections.abc import Iterator
from itertools import product
from math import inf

import pytest

from helpers.schedules.listed import listed
from helpers.schedules.solver import optimum
from scalec.compiler.schedules.activation_memory import Keeps, MemoryBudget, least
from scalec.compiler.schedules.timeline import Times, simulate

Case = tuple[tuple[int, ...], int, Times, MemoryBudget]


def alike(ranks: int, chunks: int, microbatches: int) -> Iterator[Case]:
    """Stages that are the same, with and without time for messages, from the least memory to
    any.
    """
    stage_to_rank = tuple(range(ranks)) * chunks
    for (f, b, w, comm), more in product(((1, 1, 1, 0), (2, 3, 1, 1)), (0, 1, 2, inf)):
        times = Times.uniform(len(stage_to_rank), f, b, w, comm)
        yield (
            stage_to_rank,
            microbatches,
            times,
            MemoryBudget.of_microbatches(ranks, len(stage_to_rank), chunks + more),
        )


def unlike(ranks: int, chunks: int, microbatches: int) -> Iterator[Case]:
    """Stages with times and sizes of their own."""
    draw = random.Random(100 * ranks + 10 * chunks + microbatches)
    stage_to_rank = tuple(range(ranks)) * chunks

    def row(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw.randint(least, most) for _ in stage_to_rank)

    for _ in range(4):
        times = Times(row(1, 3), row(1, 3), row(1, 3), draw.choice((0, 1, 2)))
        keeps = Keeps(row(2, 4), row(0, 2))
        bounds = (
            least(stage_to_rank, rank, keeps) + draw.choice((0, 1, 3, 6, inf))
            for rank in range(ranks)
        )
        yield stage_to_rank, microbatches, times, MemoryBudget(tuple(bounds), keeps)


def made(case: Case) -> float:
    return simulate(listed(*case), case[2]).total


@pytest.mark.sample(5)
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_optimum_is_reached_in_small_cases(ranks: int, chunks: int, microbatches: int) -> None:
    for case in (*alike(ranks, chunks, microbatches), *unlike(ranks, chunks, microbatches)):
        assert made(case) == optimum(*case), case


def test_the_solver_knows_what_is_proved_by_hand() -> None:
    """One microbatch goes there and back; several with the memory of one, one after the other."""
    times = Times((1, 2), (3, 4), (5, 6), send=10)
    assert (
        optimum((0, 1), 1, times, MemoryBudget.of_microbatches(2, 2, inf))
        == 1 + 10 + 2 + 4 + 10 + 3 + 5
    )
    assert optimum((0, 1), 2, times, MemoryBudget.of_microbatches(2, 2, 1)) == 2 * (
        1 + 10 + 2 + 4 + 10 + 3 + 5
    )
    assert optimum((0,), 3, Times.uniform(1), MemoryBudget.of_microbatches(1, 1, 1)) == 9


BEYOND = {
    "3 ranks, 2 stages each, 6 microbatches": (
        ((0, 1, 2) * 2, 6, Times.uniform(6, 2, 3, 1, 1), inf),
        83,
        78,
    ),
    "2 ranks, 3 stages each, 4 microbatches": (
        ((0, 1) * 3, 4, Times.uniform(6, 2, 3, 1, 1), inf),
        76,
        75,
    ),
}


@pytest.mark.parametrize("name", BEYOND)
def test_how_far_larger_cases_are_from_it(name: str) -> None:
    """Where the search must drop orders; what is made may become better, what is proved stays."""
    (stage_to_rank, microbatches, times, memory), found, proved = BEYOND[name]
    room = MemoryBudget.of_microbatches(max(stage_to_rank) + 1, len(stage_to_rank), memory)
    assert optimum(stage_to_rank, microbatches, times, room) == proved
    assert proved <= made((stage_to_rank, microbatches, times, room)) <= found
