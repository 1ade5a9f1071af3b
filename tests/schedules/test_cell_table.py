"""Messages that begin as one: the same at both ends, in an order that cannot deadlock where groups
wait for each other.

Purpose: the compiler's groups, and its refusal of others, against a replay of its own that knows
neither.  Non-goals: how a rank reads them
(`tests/runtime/pipeline/test_executor_message_groups.py`).
"""

from collections import Counter
from itertools import pairwise

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from helpers.schedules.samples import durations, one_f_one_b, orders, parsed
from helpers.staged_model import schedules
from scalec.compiler.schedules.actions import Action, Row, Schedule
from scalec.compiler.schedules.cell_table import cell_table, message_groups
from scalec.compiler.schedules.check import problems
from scalec.compiler.schedules.dependencies import get_payload
from scalec.compiler.schedules.p2p import message_of, with_messages
from scalec.compiler.schedules.rendezvous import rendezvous
from scalec.compiler.schedules.timeline import Times

Group = frozenset[tuple[int, int, Action]]
"""Messages by the ranks of both ends and the sending action."""


def batches(schedule: Schedule) -> list[list[Group]]:
    """What each rank begins, in order; computing left out."""
    of = {action: group for group in schedule.groups for action in group}
    made: list[list[Group]] = []
    for row in schedule.rows:
        made.append([])
        before: Row = ()
        for action in row:
            own = of.get(action, (action,))
            if action.work.is_message:
                if own is not before:
                    made[-1].append(frozenset())
                it = message_of(get_payload(action), schedule.stage_to_rank)
                assert it
                made[-1][-1] |= {(it.source, it.target, it.send)}
            before = own if action.work.is_message else ()
    return made


def sound(schedule: Schedule) -> bool:
    """Whether groups are the same at both ends, and all get done, each when it is the next of both
    its ranks.

    NCCL does what a rank begins one after the other, and a group when both its ranks have come to
    it.
    """
    rest = batches(schedule)
    if any(count != 2 for count in Counter(group for row in rest for group in row).values()):
        return False
    while any(rest):
        heads = Counter(row[0] for row in rest if row)
        if not (ready := [group for group, ends in heads.items() if ends == 2]):
            return False
        rest = [row[1:] if row and row[0] in ready else row for row in rest]
    return True


@pytest.mark.sample(4)
@pytest.mark.parametrize("ranks", range(2, 9))
def test_groups_of_all_schedules_are_mirrored_and_cannot_hang(ranks: int) -> None:
    every = [*schedules(ranks, [ranks, 2 * ranks, 2 * ranks + 1])]
    every += [(name, with_messages(each, Times.uniform(each.stages, f=2))) for name, each in every]
    assert not [name for name, each in every if not (sound(each) and sound(each.forwards))]
    assert not [name for name, each in every if problems(each) or rendezvous(each.forwards)]
    assert any(each.groups for _, each in every), "the swap of a steady state begins as one"


@given(schedule=orders(), data=st.data())
def test_groups_of_any_rows_are_mirrored_and_cannot_hang(
    schedule: Schedule, data: st.DataObject
) -> None:
    sent = with_messages(schedule, data.draw(durations(schedule.stages)))
    assert sound(sent)
    assert sound(sent.forwards)
    for group in sent.groups:
        assert len({sent.stage_to_rank[action.peer] for action in group}) == 1, "between two ranks"


@given(schedule=orders(), data=st.data())
def test_the_check_refuses_exactly_the_groups_that_a_replay_does(
    schedule: Schedule, data: st.DataObject
) -> None:
    """Any neighbouring messages of a row as a group, and on the other rank likewise, or not."""
    sent = with_messages(schedule, data.draw(durations(schedule.stages)))
    groups: list[Row] = []
    for row in sent.rows:
        of = [data.draw(st.integers(0, 2)) if action.work.is_message else -1 for action in row]
        starts = [at for at in range(len(row)) if not at or of[at] != of[at - 1]]
        runs = [row[start:end] for start, end in pairwise([*starts, len(row)]) if of[start] > 0]
        groups += [run for run in runs if len(run) > 1]
    drawn = evolve(sent, groups=tuple(groups))
    assert (not problems(drawn)) == sound(drawn)
    assert sound(evolve(sent, groups=message_groups(cell_table(sent))))


def test_a_swap_is_one_group_and_messages_to_others_are_none() -> None:
    rows = parsed((0, 1, 2), 2, "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0",
                  "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1RECV_B0 1B0 1SEND_B0", "2RECV_F0 2SEND_B0")  # fmt: skip
    assert message_groups(cell_table(rows)) == ()
    swap = parsed((0, 1), 2, "0SEND_F1 0RECV_B0", "1SEND_B0 1RECV_F1")
    assert message_groups(cell_table(swap)) == swap.rows


def test_a_group_at_one_end_alone_is_refused() -> None:
    steady = with_messages(one_f_one_b(2, 4), Times.uniform(2, f=2))
    here, there = (next(group for group in steady.groups if group[0] in row) for row in steady.rows)
    assert not problems(steady)
    (problem,) = problems(evolve(steady, groups=(here,)))
    assert (problem.rank, problem.cell) == (0, steady.rows[0].index(here[0]))
    assert problem.why == (
        "`0SEND_F2`, `0RECV_B1` begin as one, which are not neighbours in two rows that begin"
        " them so"
    )
    assert not problems(evolve(steady, groups=(here, there)))
