"""Mistakes of schedules, and where they are.

Non-goals: mistakes of messages (`test_messages`).
"""

from itertools import pairwise
from time import process_time

import pytest
from attrs import evolve
from hypothesis import assume, given
from hypothesis import strategies as st

from helpers.schedules.samples import gpipe, one_f_one_b, orders, parsed
from scalec.compiler.schedules.actions import Action, Schedule, Work
from scalec.compiler.schedules.check import problems
from scalec.compiler.schedules.dependencies import Value, get_inputs, get_result
from scalec.compiler.schedules.p2p import with_messages
from scalec.compiler.schedules.timeline import Times, simulate

PICK = st.integers(0, 2**32)


def corrupted(schedule: Schedule, rank: int, at: int, *instead: Action) -> Schedule:
    """The schedule with other actions in place of one cell."""
    row = schedule.rows[rank]
    return evolve(
        schedule,
        rows=(
            *schedule.rows[:rank],
            (*row[:at], *instead, *row[at + 1 :]),
            *schedule.rows[rank + 1 :],
        ),
    )


def cell(schedule: Schedule, pick: int) -> tuple[int, int, Action]:
    """One of the cells."""
    cells = [*schedule.cells()]
    return cells[pick % len(cells)]


def found(schedule: Schedule) -> set[tuple[int, int | None]]:
    return {(problem.rank, problem.cell) for problem in problems(schedule)}


@given(orders())
def test_an_order_that_can_be_done_has_no_problems(schedule: Schedule) -> None:
    assert problems(schedule) == []


@given(orders(), PICK)
def test_a_cell_left_out_is_lacking(schedule: Schedule, pick: int) -> None:
    rank, at, action = cell(schedule, pick)
    (problem,) = problems(corrupted(schedule, rank, at))
    assert (problem.rank, problem.cell, problem.why) == (rank, None, f"the row lacks `{action}`")


@given(orders(), PICK, PICK)
def test_a_cell_done_twice_is_found(schedule: Schedule, pick: int, where: int) -> None:
    rank, at, action = cell(schedule, pick)
    to = where % len(schedule.rows[rank])
    twice = corrupted(schedule, rank, to, action, schedule.rows[rank][to])
    first, second = sorted((to, at + (to <= at)))
    (problem,) = problems(twice)
    assert (problem.rank, problem.cell) == (rank, second)
    assert problem.why == f"`{action}`: `{action}` in cell {first} has done it"


@given(orders(), PICK, st.integers(-1, 8))
def test_a_wrong_stage_is_found(schedule: Schedule, pick: int, stage: int) -> None:
    rank, at, action = cell(schedule, pick)
    _assert_wrong(schedule, rank, at, evolve(action, stage=stage))


@given(orders(), PICK, st.integers(-1, 5))
def test_a_wrong_microbatch_is_found(schedule: Schedule, pick: int, microbatch: int) -> None:
    rank, at, action = cell(schedule, pick)
    _assert_wrong(schedule, rank, at, evolve(action, microbatch=microbatch))


@given(orders(), PICK, st.sampled_from((Work.FORWARD, Work.BACKWARD, Work.INPUT, Work.WEIGHT)))
def test_wrong_work_is_found(schedule: Schedule, pick: int, work: Work) -> None:
    rank, at, action = cell(schedule, pick)
    _assert_wrong(schedule, rank, at, evolve(action, work=work))


def _assert_wrong(schedule: Schedule, rank: int, at: int, wrong: Action) -> None:
    """The wrong action is found where it stands; where another cell does a part of the same,
    the later of both is.
    """
    right = schedule.rows[rank][at]
    assume(wrong != right)
    cells = found(corrupted(schedule, rank, at, wrong))
    same = {
        other
        for other, action in enumerate(schedule.rows[rank])
        if other != at and _shares(action, wrong)
    }
    reported = {(rank, max(at, other)) for other in same}
    if _shares(right, wrong):  # a part of it, or it and another cell's part
        assert cells <= reported | {(rank, None)}
        assert cells
    else:
        assert (rank, None) in cells
        assert len(cells) > 1
        assert cells <= (reported or {(rank, at)}) | {(rank, None)}


def _shares(a: Action, b: Action) -> bool:
    parts = {Work.FORWARD: "F", Work.BACKWARD: "IW", Work.INPUT: "I", Work.WEIGHT: "W"}
    return (a.stage, a.microbatch) == (b.stage, b.microbatch) and bool(
        set(parts[a.work]) & set(parts[b.work])
    )


@given(orders(), PICK)
def test_swapped_cells_are_found_if_the_later_needs_the_earlier(
    schedule: Schedule, pick: int
) -> None:
    dependent = [
        (rank, a, b)
        for rank, row in enumerate(schedule.rows)
        for a, first in enumerate(row)
        for b, second in enumerate(row)
        if a < b and get_result(first) in get_inputs(second, schedule.stages)
    ]
    rank, a, b = dependent[pick % len(dependent)]
    first, second = schedule.rows[rank][a], schedule.rows[rank][b]
    (problem,) = problems(corrupted(corrupted(schedule, rank, a, second), rank, b, first))
    assert (problem.rank, problem.cell) == (rank, a)
    assert (
        problem.why
        == f"`{second}` (rank {rank}, cell {a}) waits for `{first}` (rank {rank}, cell {b})"
    )


@given(orders(), PICK, PICK)
def test_any_swap_is_either_harmless_or_found_where_rows_wait(
    schedule: Schedule, pick: int, other: int
) -> None:
    """Against a check of another kind: whether the graph of all waits has a circle."""
    rank, a, _ = cell(schedule, pick)
    b = other % len(schedule.rows[rank])
    row = schedule.rows[rank]
    swapped = corrupted(corrupted(schedule, rank, a, row[b]), rank, b, row[a])
    cells = found(swapped)
    assert bool(cells) == _has_circle(swapped)
    assert all(at is not None for _, at in cells)


def _has_circle(schedule: Schedule) -> bool:
    makers: dict[Value | None, Action] = {
        get_result(action): action for _, _, action in schedule.cells()
    }
    before = {
        action: {makers[value] for value in get_inputs(action, schedule.stages)}
        for _, _, action in schedule.cells()
    }
    for row in schedule.rows:
        for first, second in pairwise(row):
            before[second].add(first)
    while free := [action for action, waits in before.items() if not waits]:
        for action in free:
            del before[action]
        for waits in before.values():
            waits.difference_update(free)
    return bool(before)


def test_a_circle_names_the_cells_that_wait_for_each_other() -> None:
    schedule = parsed((0, 1, 2), 2, "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1")
    (problem,) = problems(schedule)
    assert (problem.rank, problem.cell) == (0, 1)
    assert problem.why == (
        "`0B0` (rank 0, cell 1) waits for `1B0` (rank 1, cell 2), "
        "`1F1` (rank 1, cell 1) waits for `0F1` (rank 0, cell 2)"
    )


def test_two_circles_are_two_problems() -> None:
    schedule = parsed((0, 1), 1, "0B0 0F0", "1B0 1F0")
    assert found(schedule) == {(0, 0), (1, 0)}


def test_each_rank_lacks_its_own() -> None:
    assert [
        (problem.rank, problem.why) for problem in problems(parsed((0, 1, 5), 3, "0F0 0I0", ""))
    ] == [
        (0, "the row lacks `0W0`, `0F1`, `0B1`, `0F2` and 1 more"),
        (1, "the row lacks `1F0`, `1B0`, `1F1`, `1B1` and 2 more"),
        (5, "the row lacks `2F0`, `2B0`, `2F1`, `2B1` and 2 more"),
    ]


@pytest.mark.parametrize(
    ("row", "at", "why"),
    [
        ("0F0 0B0 0W0", 2, "`0W0`: `0B0` in cell 1 has done it"),
        ("0F0 0I0 0W0 0B0", 3, "`0B0`: `0I0` in cell 1 has done it"),
        ("0F0 0W0 0I0", 1, "`0W0` (rank 0, cell 1) waits for `0I0` (rank 0, cell 2)"),
        ("0F0 0B0 1F0", 2, "`1F0`: there is no stage 1"),
        ("0F0 0B0 0F1", 2, "`0F1`: there is no microbatch 1"),
    ],
)
def test_mistakes_of_one_row(row: str, at: int, why: str) -> None:
    (problem,) = problems(parsed((0,), 1, row))
    assert (problem.rank, problem.cell, problem.why) == (0, at, why)
    assert problem.help


def test_a_stage_of_another_rank_is_told_whose_it_is() -> None:
    schedule = gpipe(2, 1)
    wrong, lacking = problems(corrupted(schedule, 0, 1, Action(1, Work.FORWARD, 0)))
    assert (wrong.rank, wrong.cell, wrong.why, wrong.help) == (
        0,
        1,
        "`1F0`: rank 0 does not have stage 1",
        "rank 1 has it",
    )
    assert (lacking.rank, lacking.cell) == (0, None)


def test_time_grows_linearly_with_actions() -> None:
    """4 times the microbatches take about 4 times as long, not 16, by the processor's clock."""
    few, many = (
        min(_seconds(one_f_one_b(8, microbatches, 4)) for _ in range(3))
        for microbatches in (64, 256)
    )
    assert many < 8 * few


def _seconds(schedule: Schedule) -> float:
    times = Times.uniform(schedule.stages, comm=0.1)
    start = process_time()
    simulate(schedule, times)
    assert problems(with_messages(schedule, times)) == []
    return process_time() - start
