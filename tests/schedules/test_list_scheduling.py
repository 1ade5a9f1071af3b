"""Schedules made for times and memory: within the bound, no slower than those with names, the
best in small cases.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.schedules.listed import listed
from helpers.schedules.samples import durations
from scalec.compiler.schedules.actions import Action, Schedule, ScheduleError, Work
from scalec.compiler.schedules.activation_memory import Keeps, MemoryBudget, high_water, least
from scalec.compiler.schedules.check import problems
from scalec.compiler.schedules.dependencies import Value, get_inputs, get_result
from scalec.compiler.schedules.p2p import with_messages
from scalec.compiler.schedules.registry import SCHEDULES
from scalec.compiler.schedules.timeline import Times, simulate

F, B, IN, W = Work.FORWARD, Work.BACKWARD, Work.INPUT, Work.WEIGHT


class Exact:
    """Whether any order at all takes less than a time: all are gone through in the order in
    which their cells begin.
    """

    def __init__(
        self,
        stage_to_rank: tuple[int, ...],
        count: int,
        times: Times,
        memory: tuple[float, ...],
        keeps: Keeps,
    ) -> None:
        self.stage_to_rank, self.count, self.times, self.memory, self.keeps = (
            stage_to_rank,
            count,
            times,
            memory,
            keeps,
        )
        self.seen: set[object] = set()

    def beats(self, total: float) -> bool:
        work = [
            Action(s, part, m)
            for s in range(len(self.stage_to_rank))
            for part in (F, IN, W)
            for m in range(self.count)
        ]
        self.seen.clear()
        return self._goes_on(
            frozenset(work), {}, (0.0,) * len(self.memory), (0.0,) * len(self.memory), 0.0, total
        )

    def _goes_on(self, left: frozenset[Action], done: dict[Value, float], free: tuple[float, ...],
                 held: tuple[float, ...], now: float, total: float) -> bool:  # fmt: skip
        state = (left, tuple(sorted(done.items())), free, now)
        if state in self.seen or any(
            at
            + sum(
                self.times.get_time(action)
                for action in left
                if self.stage_to_rank[action.stage] == rank
            )
            >= total
            for rank, at in enumerate(free)
        ):
            return False
        self.seen.add(state)
        return not left or any(
            self._does(action, left, done, free, held, now, total) for action in self._next(left)
        )

    def _next(self, left: frozenset[Action]) -> list[Action]:
        """Backward in one or its first part; of alike microbatches that have done as much, one
        stands for all.
        """
        progress: dict[object, int] = {}
        for m in reversed(range(self.count)):
            progress[frozenset((a.stage, a.work) for a in left if a.microbatch == m)] = m
        found = [a for a in left if a.microbatch in progress.values()]
        return sorted(
            [*found, *(Action(a.stage, B, a.microbatch) for a in found if a.work is IN)], key=str
        )

    def _does(self, action: Action, left: frozenset[Action], done: dict[Value, float], free: tuple[float, ...],
              held: tuple[float, ...], now: float, total: float) -> bool:  # fmt: skip
        rank, stage = self.stage_to_rank[action.stage], action.stage
        waits = get_inputs(action, len(self.stage_to_rank))
        if any(value not in done for value in waits):
            return False
        late = [done[v] + self.times.send * (self.stage_to_rank[v.stage] != rank) for v in waits]
        start = max(free[rank], *late, 0.0)
        more = {
            F: self.keeps.input[stage],
            B: -self.keeps.input[stage],
            IN: self.keeps.weight[stage] - self.keeps.input[stage],
            W: -self.keeps.weight[stage],
        }[action.work]
        if start < now or held[rank] + more > self.memory[rank]:
            return False
        end = start + self.times.get_time(action)
        parts = (IN, W) if action.work is B else (action.work,)
        value = get_result(action)
        return self._goes_on(
            left - {Action(stage, part, action.microbatch) for part in parts},
            {**done, value: end} if value else done,
            (*free[:rank], end, *free[rank + 1 :]),
            (*held[:rank], held[rank] + more, *held[rank + 1 :]),
            start,
            total,
        )


@st.composite
def tasks(
    draw: st.DrawFn, ranks: int, stage_to_rank: tuple[int, ...]
) -> tuple[Times, tuple[float, ...], Keeps]:
    """Small whole times; memory that is just enough for some, plenty for others."""

    def row(least: int, most: int) -> tuple[float, ...]:
        return tuple(
            draw(
                st.lists(
                    st.integers(least, most),
                    min_size=len(stage_to_rank),
                    max_size=len(stage_to_rank),
                )
            )
        )

    times = Times(row(1, 3), row(0, 3), row(0, 3), draw(st.sampled_from((0, 1))))
    keeps = Keeps(row(1, 2), row(0, 3))
    alone = [
        sum(keeps.input[s] for s, home in enumerate(stage_to_rank) if home == rank)
        for rank in range(ranks)
    ]
    more = st.sampled_from((0, 1, 2, 3, inf))
    return times, tuple(least + draw(more) for least in alone), keeps


SMALL = [
    ((0, 1), 2),
    ((0, 1), 3),
    ((0, 1, 2), 2),
    ((0, 0), 2),
    ((0, 1, 1, 0), 2),
    ((0, 1, 0, 1), 2),
]


def within(schedule: Schedule, memory: tuple[float, ...], keeps: Keeps) -> bool:
    return all(
        most <= bound for most, bound in zip(high_water(schedule, keeps), memory, strict=True)
    )


def made(
    stage_to_rank: tuple[int, ...],
    count: int,
    times: Times,
    memory: tuple[float, ...],
    keeps: Keeps,
) -> float:
    """How long the schedule takes, which is right and keeps the bound."""
    schedule = listed(stage_to_rank, count, times, MemoryBudget(memory, keeps))
    assert problems(schedule) == []
    assert within(schedule, memory, keeps)
    return simulate(schedule, times).total


@pytest.mark.sample(2)
@pytest.mark.parametrize(("stage_to_rank", "count"), SMALL)
@settings(max_examples=10)
@given(data=st.data())
def test_no_order_beats_a_small_one(
    stage_to_rank: tuple[int, ...], count: int, data: st.DataObject
) -> None:
    times, memory, keeps = data.draw(tasks(max(stage_to_rank) + 1, stage_to_rank))
    total = made(stage_to_rank, count, times, memory, keeps)
    exact = Exact(stage_to_rank, count, times, memory, keeps)
    assert exact.beats(total + 0.5), "the exact search itself finds orders"
    assert not exact.beats(total)


@pytest.mark.long
def test_no_order_beats_one_of_three_ranks_and_three_microbatches() -> None:
    times = Times(forward=(1, 3, 2), input=(2, 3, 1), weight=(3, 0, 2), send=1)
    memory, keeps = (2.0, 3.0, 2.0), Keeps(input=(1, 1, 2), weight=(1, 2, 1))
    assert not Exact((0, 1, 2), 3, times, memory, keeps).beats(
        made((0, 1, 2), 3, times, memory, keeps)
    )


@settings(max_examples=30)
@given(data=st.data())
def test_memory_is_never_exceeded_wherever_stages_are(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    stage_to_rank = tuple(data.draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=7)))
    made(stage_to_rank, data.draw(st.integers(1, 6)), *data.draw(tasks(ranks, stage_to_rank)))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=4)
@given(data=st.data(), ranks=st.integers(2, 4), layers=st.integers(2, 3))
def test_no_schedule_with_a_name_is_better(
    name: str, data: st.DataObject, ranks: int, layers: int
) -> None:
    schedule = SCHEDULES[name](ranks, layers * ranks)
    times, _, keeps = data.draw(tasks(ranks, schedule.stage_to_rank))
    memory = high_water(schedule, keeps)
    assert (
        made(schedule.stage_to_rank, layers * ranks, times, memory, keeps)
        <= simulate(schedule, times).total
    )


def test_a_schedule_with_a_name_is_taken_where_it_is_the_best() -> None:
    """Too large to be searched well, and better than what rules make."""
    named = SCHEDULES["interleaved_zero_bubble"](4, 16)
    times, keeps = Times.uniform(8, comm=0.1), Keeps.uniform(8)
    assert made(named.stage_to_rank, 16, times, high_water(named), keeps) == pytest.approx(
        simulate(named, times).total
    )


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (8, 16)])
def test_with_the_memory_of_1f1b_the_bubble_is_that_of_zero_bubble_h1(
    ranks: int, count: int
) -> None:
    """(p − 1)(f + b − w), Qi et al. 2024, table 2."""
    total = made(
        tuple(range(ranks)), count, Times.uniform(ranks), (ranks,) * ranks, Keeps.uniform(ranks)
    )
    assert total == 3 * count + ranks - 1


def test_backward_is_split_only_where_somebody_waits_for_its_first_part() -> None:
    """Nobody waits for the first stage's, so no I there is followed by its own W."""
    first, last = listed((0, 1), 4, Times.uniform(2), MemoryBudget.of_microbatches(2, 2, 2)).rows
    assert [
        (a, b)
        for a, b in pairwise(first)
        if (a.work, b.work) == (IN, W) and a.microbatch == b.microbatch
    ] == []
    assert any(action.work is IN for action in last)


def test_backward_in_one_is_what_memory_leaves_where_the_parts_hold_more() -> None:
    """As where a stage is recomputed: its forward keeps little, its first part all that its
    second needs.
    """
    schedule = listed(
        (0, 1), 2, Times.uniform(2), MemoryBudget((2, 2), Keeps(input=(1, 1), weight=(5, 5)))
    )
    assert {action.work for row in schedule.rows for action in row} == {F, B}


def test_what_one_microbatch_needs_is_demanded() -> None:
    needs = "rank 1 holds 5 for one microbatch before any backward, its memory budget is 4"
    with pytest.raises(ScheduleError, match=needs):
        listed(
            (0, 1, 1),
            2,
            Times.uniform(3),
            MemoryBudget((9, 4), Keeps(input=(1, 2, 3), weight=(0, 0, 0))),
        )


@st.composite
def rooms(draw: st.DrawFn, ranks: int, stage_to_rank: tuple[int, ...]) -> MemoryBudget:
    """Bytes: what a microbatch needs on each rank, and some more; what stages hand on is a part
    of what they keep.
    """
    cuts = tuple(
        draw(
            st.lists(
                st.integers(0, 20), min_size=len(stage_to_rank) - 1, max_size=len(stage_to_rank) - 1
            )
        )
    )
    cuts = draw(st.sampled_from([cuts, cuts[:1] * len(cuts)]))
    kept = tuple(draw(st.integers(given, 100)) for given in (0, *cuts))
    keeps = Keeps(
        kept, tuple(draw(st.integers(0, 120)) for _ in stage_to_rank), max(cuts, default=0), cuts
    )
    more = st.sampled_from((0, 1, 10, 50, 200, inf))
    return MemoryBudget(
        tuple(least(stage_to_rank, rank, keeps) + draw(more) for rank in range(ranks)), keeps
    )


@pytest.mark.long
@settings(max_examples=60)
@given(data=st.data())
def test_bytes_are_never_exceeded_whatever_stages_keep_and_hand_on(data: st.DataObject) -> None:
    """What rows hold is counted here with their messages, as `simulate` has them in time."""
    ranks = data.draw(st.integers(1, 4))
    stage_to_rank = tuple(data.draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=7)))
    times, room = data.draw(durations(len(stage_to_rank))), data.draw(rooms(ranks, stage_to_rank))
    schedule = with_messages(
        listed(stage_to_rank, data.draw(st.integers(1, 6)), times, room), times
    )
    assert problems(schedule) == []
    assert all(
        held <= most
        for held, most in zip(measured_bytes(schedule, room.keeps), room.most, strict=True)
    )


def measured_bytes(schedule: Schedule, keeps: Keeps) -> list[float]:
    """The most that each rank holds while it computes, counted anew for each action from all
    cells before it.
    """
    return [
        max(
            (
                get_held_size(row[:at], it, keeps, schedule.stages)
                for at, it in enumerate(row)
                if not it.work.is_message
            ),
            default=0,
        )
        for row in schedule.rows
    ]


def get_held_size(done: Sequence[Action], now: Action, keeps: Keeps, stages: int) -> float:
    """Each stage and microbatch by what was done of it last, and values that came or were made
    and are not taken.
    """
    found: dict[tuple[int, int], float] = {}
    values: set[tuple[str, int, int]] = set()
    for it in (*done, now):
        s, m = it.stage, it.microbatch
        before = found.get((s, m), 0)
        match it.work:
            case Work.FORWARD:
                found[s, m] = keeps.input[s]
                values -= {("x", s, m)}
                values |= {("x", s + 1, m)} if s + 1 < stages and it is not now else set()
            case Work.INPUT | Work.BACKWARD:
                found[s, m] = keeps.weight[s] if it.work is Work.INPUT else 0
                values -= {("dy", s, m)}
                values |= {("dy", s - 1, m)} if s and it is not now else set()
            case Work.WEIGHT:
                found[s, m] = 0
            case Work.RECEIVE_FORWARD | Work.RECEIVE_BACKWARD:
                values |= {("x" if it.work is Work.RECEIVE_FORWARD else "dy", s, m)}
            case _:
                what, to = ("x", s + 1) if it.work is Work.SEND_FORWARD else ("dy", s - 1)
                values = {each for each in values if each[:2] != (f"sent {what}", s)} - {
                    (what, to, m)
                }
                values |= {(f"sent {what}", s, m)}
        if it is now:
            found[s, m] = max(before, found[s, m])
    return sum(found.values()) + sum(
        keeps.cuts[s - (what in ("x", "sent dy"))] for what, s, _ in values
    )


def test_backward_that_cannot_be_split_has_a_schedule_with_a_name() -> None:
    room = MemoryBudget.of_microbatches(2, 4, 3)
    schedule = listed((0, 1, 0, 1), 4, Times.uniform(4), room, splits=False)
    assert not schedule.splits
    assert room.holds(schedule)
