"""Where messages stand in rows, and that rows with messages cannot deadlock."""

from itertools import pairwise

import pytest
from attrs import evolve
from hypothesis import assume, given
from hypothesis import strategies as st

from helpers.schedules.samples import durations, gpipe, one_f_one_b, orders, parsed
from scalec.compiler.schedules.actions import Action, Schedule
from scalec.compiler.schedules.check import problems
from scalec.compiler.schedules.dependencies import get_payload, get_result
from scalec.compiler.schedules.p2p import message_of, with_messages
from scalec.compiler.schedules.rendezvous import rendezvous
from scalec.compiler.schedules.timeline import Times, simulate


def written(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.rows]


def changed(schedule: Schedule, rank: int, row: list[Action]) -> Schedule:
    return evolve(schedule, rows=(*schedule.rows[:rank], tuple(row), *schedule.rows[rank + 1 :]))


@given(schedule=orders(), data=st.data())
def test_forwards_of_rows_that_pass_pass_alone(schedule: Schedule, data: st.DataObject) -> None:
    """Whoever ordered them: here neighbours change places at random, where the rows are right
    after it too.
    """
    rows = with_messages(schedule, data.draw(durations(schedule.stages)))
    draw = data.draw(st.randoms(use_true_random=False))
    for _ in range(20):
        rank = draw.randrange(rows.ranks)
        if len(row := rows.rows[rank]) > 1:
            at = draw.randrange(len(row) - 1)
            other = changed(rows, rank, [*row[:at], row[at + 1], row[at], *row[at + 2 :]])
            rows = rows if problems(other) else other
    assert rendezvous(rows.forwards) == []
    assert {action.work.value for _, _, action in rows.forwards.cells()} <= {
        "F",
        "SEND_F",
        "RECV_F",
    }
    assert sum(len(row) for row in rows.forwards.rows) >= rows.stages * rows.microbatches


def test_sends_follow_and_receives_are_posted_early() -> None:
    schedule = with_messages(gpipe(2, 2), Times.uniform(2))
    assert written(schedule) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    ]


def test_messages_in_both_directions_meet_in_one_batch() -> None:
    """In the steady state of 1F1B one rank's forward and the next's backward begin together, as
    do their messages.
    """
    rows = written(with_messages(one_f_one_b(2, 4), Times.uniform(2, f=2)))
    assert "0F2 0SEND_F2 0RECV_B1 0B1" in rows[0]
    assert "1B1 1RECV_F2 1SEND_B1 1F2" in rows[1]


def test_stages_of_one_rank_send_nothing() -> None:
    schedule = parsed((0, 1, 1, 0), 1, "0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")
    assert written(with_messages(schedule, Times.uniform(4))) == [
        "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0",
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0",
    ]


@given(schedule=orders(), data=st.data())
def test_rows_with_messages_pass_rendezvous(schedule: Schedule, data: st.DataObject) -> None:
    times = data.draw(durations(schedule.stages))
    sent = with_messages(schedule, times)
    assert problems(schedule) == problems(sent) == rendezvous(sent) == []
    assert (
        tuple(tuple(a for a in row if not a.work.is_message) for row in sent.rows) == schedule.rows
    )
    assert with_messages(sent, times) == sent
    assert simulate(sent, times) == simulate(schedule, times)
    for row in sent.rows:
        for before, action in pairwise(row):
            if action.work.value.startswith("SEND"):
                assert before.work.is_message or get_result(before) == get_payload(action)


@given(schedule=orders(), data=st.data())
def test_one_message_at_a_time_needs_no_batches(schedule: Schedule, data: st.DataObject) -> None:
    """Rows go on even if each send and each receive blocks by itself."""
    sent = with_messages(schedule, data.draw(durations(schedule.stages)))
    rest = [list(reversed(row)) for row in sent.rows]
    while able := [
        rank
        for rank, row in enumerate(rest)
        if row and _can_go_on(row[-1], rest, sent.stage_to_rank)
    ]:
        action = rest[able[0]].pop()
        if action.work.is_message and (it := message_of(get_payload(action), sent.stage_to_rank)):
            rest[it.target].pop()
    assert not any(rest)


def _can_go_on(action: Action, rest: list[list[Action]], stage_to_rank: tuple[int, ...]) -> bool:
    """Whether a rank's next cell computes, or sends what another's next cell receives."""
    it = message_of(get_payload(action), stage_to_rank) if action.work.is_message else None
    return not it or (it.send == action and rest[it.target][-1:] == [it.receive])


MESSAGES = with_messages(one_f_one_b(3, 4), Times.uniform(3))


@pytest.mark.parametrize(
    ("rank", "at"), [(r, at) for r, at, action in MESSAGES.cells() if action.work.is_message]
)
def test_a_message_that_is_left_out_or_done_twice_is_found(rank: int, at: int) -> None:
    row = [*MESSAGES.rows[rank]]
    (lacking,) = problems(changed(MESSAGES, rank, row[:at] + row[at + 1 :]))
    assert (lacking.rank, lacking.cell) == (rank, None)
    assert f"`{row[at]}`" in lacking.why
    (twice,) = problems(changed(MESSAGES, rank, [*row, row[at]]))
    assert (twice.rank, twice.cell) == (rank, len(row))
    assert twice.why == f"`{row[at]}`: cell {at} has done it"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("2SEND_F0", "`2SEND_F0`: no other rank has the stage to which this goes"),
        ("2RECV_B1", "`2RECV_B1`: no other rank has the stage from which this goes"),
        ("1RECV_F0", "`1RECV_F0`: rank 2 does not have stage 1"),
        ("3RECV_F0", "`3RECV_F0`: there is no stage 3"),
        ("2RECV_F4", "`2RECV_F4`: there is no microbatch 4"),
    ],
)
def test_a_message_to_nowhere_is_found(text: str, why: str) -> None:
    ((message,),) = parsed((0,), 1, text).rows
    row = [*MESSAGES.rows[2]]
    (problem,) = problems(changed(MESSAGES, 2, [*row[:5], message, *row[5:]]))
    assert (problem.rank, problem.cell, problem.why) == (2, 5, why)


@given(schedule=orders(), data=st.data())
def test_swapped_receives_are_found(schedule: Schedule, data: st.DataObject) -> None:
    """Two receives of one rank from another, exchanged: each gets the other's value, or stands
    behind its use.
    """
    sent = with_messages(schedule, data.draw(durations(schedule.stages)))
    receives = [
        (rank, at, sent.stage_to_rank[get_payload(action).stage])
        for rank, at, action in sent.cells()
        if action.work.value.startswith("RECV")
    ]
    pairs = [
        (r, a, b) for r, a, p in receives for s, b, q in receives if (r, p) == (s, q) and a < b
    ]
    assume(pairs)
    rank, first, second = data.draw(st.sampled_from(pairs))
    row = [*sent.rows[rank]]
    row[first], row[second] = row[second], row[first]
    found = problems(changed(sent, rank, row))
    assert [(problem.rank, problem.cell) for problem in found] in (
        [(rank, first)],
        [(rank, second)],
    )


def test_receives_in_another_order_than_sends_get_the_wrong_values() -> None:
    schedule = parsed((0, 1), 2, "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
                      "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1")  # fmt: skip
    (problem,) = rendezvous(schedule)
    assert (problem.rank, problem.cell) == (1, 0)
    assert problem.why == "`1RECV_F1` gets `0SEND_F0` (cell 1) of rank 0"


def test_messages_on_the_wrong_side_of_computing_are_found() -> None:
    late = parsed((0, 1), 1, "0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1RECV_F0 1SEND_B0 1B0")
    assert [(problem.rank, problem.cell, problem.why) for problem in rendezvous(late)] == [
        (1, 2, "`1SEND_B0` comes before `1B0`, which computes what it sends"),
        (1, 1, "`1RECV_F0` comes after `1F0`, which needs what it receives"),
    ]


def test_a_deadlock_names_the_messages_that_wait_for_each_other() -> None:
    """Each rank receives first what the other sends only behind its own receive."""
    schedule = parsed((0, 1, 0, 1), 1,
                      "0F0 0SEND_F0 2RECV_F0 2F0 2SEND_F0 2RECV_B0 2B0 2SEND_B0 0RECV_B0 0B0",
                      "1RECV_F0 1F0 3RECV_F0 3F0 1SEND_F0 3B0 3SEND_B0 1RECV_B0 1B0 1SEND_B0")  # fmt: skip
    (problem,) = problems(schedule)
    assert (problem.rank, problem.cell) == (0, 2)
    assert problem.why == (
        "`2RECV_F0` (rank 0, cell 2) waits for `1SEND_F0` (rank 1, cell 4), "
        "`3RECV_F0` (rank 1, cell 2) waits for `2SEND_F0` (rank 0, cell 4)"
    )


def test_messages_are_demanded_by_rendezvous_only() -> None:
    assert problems(gpipe(2, 1)) == []
    assert [(problem.rank, problem.why) for problem in rendezvous(gpipe(2, 1))] == [
        (0, "the row lacks `0SEND_F0`, `0RECV_B0`"),
        (1, "the row lacks `1RECV_F0`, `1SEND_B0`"),
    ]


def test_messages_that_would_wait_for_computing_of_the_other_rank_are_found() -> None:
    """Rank 0 could begin both as one, but rank 1 computes between them: a backend may take them
    one after the other.
    """
    schedule = parsed((0, 1), 2,
                      "0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0B0 0RECV_B1 0B1",
                      "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1")  # fmt: skip
    (problem,) = problems(schedule)
    assert problem.why == (
        "`0RECV_B0` (rank 0, cell 3) waits for `1SEND_B0` (rank 1, cell 4), "
        "`1RECV_F1` (rank 1, cell 2) waits for `0SEND_F1` (rank 0, cell 4)"
    )
    mended = parsed((0, 1), 2,
                    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
                    "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1")  # fmt: skip
    assert not problems(mended)
