"""Messages that begin as one: alike at both ends, in an order that cannot deadlock where groups wait for each other."""

from collections import defaultdict
from collections.abc import Sequence

import pytest

from helpers.staged_model import schedules
from scalec.compiler.schedules.p2p import with_messages
from scalec.compiler.schedules.timeline import Times
from scalec.runtime.pipeline.message_groups import Action, Move, grouped, joined, read

Groups = list[list[frozenset[Move]]]
"""Of each rank, in order; computing left out."""


def _groups(rows: Sequence[Sequence[Action]], stage_to_rank: Sequence[int]) -> Groups:
    together = joined(rows, stage_to_rank)
    return [
        [frozenset(it.move for it in group) for group in grouped(row, together) if group[0].is_message] for row in rows
    ]


def _as_neighbours(rows: Sequence[Sequence[Action]]) -> Groups:
    """All messages without computing between them, whatever the other end does: what may not be mirrored."""
    found: Groups = []
    for row in rows:
        found.append([])
        for before, action in zip([None, *row], row, strict=False):
            if action.is_message and before is not None and before.is_message:
                found[-1][-1] |= {action.move}
            elif action.is_message:
                found[-1].append(frozenset({action.move}))
    return found


def _mirrored(groups: Groups) -> bool:
    ends = defaultdict[frozenset[Move], int](int)
    for row in groups:
        for group in row:
            ends[group] += 1
    return all(count == 2 for count in ends.values())


def _all_done(groups: Groups) -> bool:
    """Each rank does its groups one after the other, each together with the other rank that has it."""
    rest = [[*row] for row in groups]
    while any(rest):
        heads = [row[0] for row in rest if row]
        ready = [group for group in heads if heads.count(group) == 2]
        if not ready:
            return False
        for row in rest:
            if row and row[0] in ready:
                row.pop(0)
    return True


@pytest.mark.parametrize("ranks", range(2, 9))
def test_groups_are_mirrored_and_cannot_deadlock(ranks: int) -> None:
    every = [*schedules(ranks, [ranks, 2 * ranks, 2 * ranks + 1])]
    every += [(name, with_messages(each, Times.uniform(each.stages, f=2))) for name, each in every]
    larger = 0
    for name, schedule in every:
        rows = [read(",".join(row)) for row in schedule.words]
        for kept in (rows, [[each for each in row if each.is_forward] for row in rows]):
            groups = _groups(kept, schedule.stage_to_rank)
            assert _mirrored(groups), name
            assert _all_done(groups), name
            moves = [move for row in groups for group in row for move in group]
            assert sorted(moves) == sorted(it.move for row in kept for it in row if it.is_message)
            larger += sum(len(group) > 1 for row in groups for group in row)
    assert larger, "the swap of a steady state begins as one"


def test_neighbours_on_one_rank_alone_are_not_mirrored() -> None:
    every = [schedule for ranks in (2, 4, 8) for _, schedule in schedules(ranks, [2 * ranks])]
    rows = [[read(",".join(row)) for row in schedule.words] for schedule in every]
    assert not all(_mirrored(_as_neighbours(each)) for each in rows)


def test_a_swap_is_one_group_and_messages_to_others_are_none() -> None:
    rows = [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0",
        "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1RECV_B0,1B0,1SEND_B0",
        "2RECV_F0,2SEND_B0",
    ]
    made = _groups([read(row) for row in rows], (0, 1, 2))
    assert made == [
        [{("F", 0, 0)}, {("F", 0, 1)}, {("B", 1, 0)}],
        [{("F", 0, 0)}, {("F", 1, 0)}, {("F", 0, 1)}, {("B", 2, 0)}, {("B", 1, 0)}],
        [{("F", 1, 0)}, {("B", 2, 0)}],
    ]
    swap = ["0SEND_F1,0RECV_B0", "1SEND_B0,1RECV_F1"]
    assert _groups([read(row) for row in swap], (0, 1)) == [[{("F", 0, 1), ("B", 1, 0)}]] * 2
