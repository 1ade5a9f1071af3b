"""Where `auto` lays stages: no schedule with a name that keeps the bound is faster, around the
ranks or down and up.
"""

from collections.abc import Callable, Iterator
from itertools import product

import pytest
from attrs import frozen

from scalec.compiler.schedules.actions import Schedule, ScheduleError
from scalec.compiler.schedules.activation_memory import MemoryBudget, high_water
from scalec.compiler.schedules.check import problems
from scalec.compiler.schedules.feasibility import Task
from scalec.compiler.schedules.list_scheduling import fastest
from scalec.compiler.schedules.registry import SCHEDULES, loop_placement, v_placement
from scalec.compiler.schedules.timeline import Times, simulate


@frozen
class Named:
    """A schedule with a name, the most microbatches that a rank of it holds, and how long it
    takes.
    """

    name: str
    held: float
    total: float


def alike(stages: int) -> Times:
    """All stages the same."""
    return Times.uniform(stages)


def unlike(stages: int) -> Times:
    """A dear head, a cheap first stage, and messages that take time."""
    times = (0.5, *(1.0,) * (stages - 2), 1.5)[:stages]
    return Times(times, times, times, send=0.25)


def named(ranks: int, chunks: int, microbatches: int, times: Times) -> Iterator[Named]:
    """All that there are with so many stages on a rank."""
    for name, maker in SCHEDULES.items():
        try:
            schedule = maker(ranks, microbatches, chunks)
        except ScheduleError:
            continue
        yield Named(name, max(high_water(schedule)), simulate(schedule, times).total)


def auto(ranks: int, chunks: int, microbatches: int, times: Times, most: float) -> Schedule:
    """The schedule that is made, which is right and keeps the bound."""
    placements = dict.fromkeys((loop_placement(ranks, chunks), v_placement(ranks, chunks)))
    room = MemoryBudget.of_microbatches(ranks, ranks * chunks, most)
    schedule = fastest(
        [Task(stage_to_rank, microbatches, times, room) for stage_to_rank in placements]
    )
    assert problems(schedule) == []
    assert room.holds(schedule)
    return schedule


def demand_none_faster(
    ranks: int, chunks: int, microbatches: int, times: Times, every: bool
) -> None:
    """For the bounds that schedules with names need, and, if `every`, for those between."""
    known = [*named(ranks, chunks, microbatches, times)]
    bounds = {int(it.held) for it in known}
    for most in range(chunks, max(bounds) + 1) if every else sorted(bounds):
        total = simulate(auto(ranks, chunks, microbatches, times, most), times).total
        for it in known:
            assert it.held > most or total <= it.total + 1e-9, (it, most, total)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "times"), [*product((2, 3, 4, 5), (alike, unlike))])
def test_no_schedule_with_a_name_that_keeps_the_bound_is_faster(
    ranks: int, times: Callable[[int], Times]
) -> None:
    for chunks, microbatches in ((1, 6), (2, 2), (2, 6), (2, 9), (2, 12), (3, 6)):
        demand_none_faster(ranks, chunks, microbatches, times(ranks * chunks), every=False)


@pytest.mark.long
@pytest.mark.parametrize("times", [alike, unlike])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize(("ranks", "chunks"), [*product(range(1, 6), range(1, 4))])
def test_none_is_faster_whatever_the_bound(
    ranks: int, chunks: int, microbatches: int, times: Callable[[int], Times]
) -> None:
    demand_none_faster(ranks, chunks, microbatches, times(ranks * chunks), every=True)


def test_with_the_least_memory_stages_lie_down_and_up() -> None:
    """A microbatch that is alone on its way waits for fewer messages, and holds the last rank
    for a shorter time.
    """
    assert auto(4, 2, 6, alike(8), most=2).stage_to_rank == v_placement(4, 2)
    assert auto(4, 2, 6, alike(8), most=100).stage_to_rank == loop_placement(4, 2), (
        "of two that are as fast, around the ranks"
    )
