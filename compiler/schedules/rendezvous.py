"""Whether the messages of any rows all arrive.  This imports numpy, as `cell_table` does."""

from collections import deque
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from .actions import Action, Schedule
from .cell_table import CellTable, Numbers, cell_table
from .dependencies import Cell
from .p2p import carried, message_of
from .violations import Problem, circular, lacking, misplaced


def rendezvous(schedule: Schedule) -> list[Problem]:
    """Problems of the messages of a schedule whose cells and order are right.

    Messages of two ranks that are neighbours in both rows are one batch: all are posted at once, and the row goes on
    when all are matched.
    """
    ways = _ways(cell_table(schedule))
    if found := [*_superfluous(ways), *_lacking(ways)]:
        return found
    return [*_misordered(ways)] or [*_mismatched(ways)] or _deadlocks(ways)


@frozen(eq=False)
class _Ways:
    """Where each value that crosses from rank to rank is made, sent, received and needed, by the numbers of cells.

    moves  the value that each cell moves
    known  the cells that send or receive one first
    """

    cells: CellTable
    moves: Numbers
    known: NDArray[np.bool_]
    made: Numbers
    sent: Numbers
    received: Numbers
    used: Numbers


def _ways(cells: CellTable) -> _Ways:
    moves = cells.values(lambda action: carried(action) if action.work.is_message else None)
    used = np.max([cells.where_of(values, cells.elsewhere(values)) for values in cells.needed], axis=0)
    fit = np.flatnonzero(cells.at_home & (used[moves] >= 0))
    known = np.zeros(len(moves), dtype=bool)
    known[fit[np.unique(2 * moves[fit] + cells.are_sends[fit], return_index=True)[1]]] = True
    sent, received = (cells.where_of(moves, known & end) for end in (cells.are_sends, ~cells.are_sends))
    return _Ways(cells, moves, known, cells.makers, sent, received, used)


def _superfluous(ways: _Ways) -> Iterator[Problem]:
    """Messages that go nowhere, and those that a cell before is."""
    for number in np.flatnonzero(ways.cells.are_messages & ~ways.known):
        cell, action = ways.cells.cell(number), ways.cells.action(number)
        value, sends = ways.moves[number], action.work.sends
        if problem := misplaced(cell, action, ways.cells.schedule):
            yield problem
        elif ways.used[value] < 0:
            why = f"`{action}`: no other rank has the stage {'to' if sends else 'from'} which this goes"
            yield Problem(*cell, why, "leave this cell out")
        else:
            first = ways.cells.cell((ways.sent if sends else ways.received)[value])
            yield Problem(*cell, f"`{action}`: cell {first.at} has done it", "leave one of the two cells out")


def _lacking(ways: _Ways) -> list[Problem]:
    missing: list[tuple[int, Action]] = []
    lost = np.flatnonzero((ways.used >= 0) & ((ways.sent < 0) | (ways.received < 0)))
    for value in sorted(lost, key=ways.made.__getitem__):
        if it := message_of(ways.cells.value(int(value)), ways.cells.schedule.stage_to_rank):
            missing += [(it.source, it.send)] if ways.sent[value] < 0 else []
            missing += [(it.target, it.receive)] if ways.received[value] < 0 else []
    return lacking(missing, "what a stage of another rank needs is sent once and received once")


def _misordered(ways: _Ways) -> Iterator[Problem]:
    """Sends before their value is made, and receives after the cell that needs it."""
    cells, every = ways.cells, np.arange(len(ways.moves))
    for number in np.flatnonzero(ways.known & ways.cells.are_sends & (every < ways.made[ways.moves])):
        made = ways.made[ways.moves[number]]
        why = f"`{cells.action(number)}` comes before `{cells.action(made)}`, which computes what it sends"
        yield Problem(*cells.cell(number), why, f"put it after cell {cells.at[made]}")
    for number in np.flatnonzero(ways.known & ~ways.cells.are_sends & (every > ways.used[ways.moves])):
        used = ways.used[ways.moves[number]]
        why = f"`{cells.action(number)}` comes after `{cells.action(used)}`, which needs what it receives"
        yield Problem(*cells.cell(number), why, f"put it before cell {cells.at[used]}")


def _mismatched(ways: _Ways) -> Iterator[Problem]:
    """For each two ranks the first receive that gets another value than it says."""
    cells, sent = ways.cells, np.flatnonzero(ways.known & ways.cells.are_sends)
    received = ways.received[ways.moves[sent]]
    pairs = cells.rank[sent] * cells.schedule.ranks + cells.rank[received]
    for pair in dict.fromkeys(pairs.tolist()):
        leaving = np.flatnonzero(pairs == pair)
        arriving = leaving[np.argsort(received[leaving])]
        for at in np.flatnonzero(leaving != arriving)[:1]:
            (target, cell), (source, other) = cells.cell(received[arriving[at]]), cells.cell(sent[leaving[at]])
            rows = cells.schedule.rows
            why = f"`{rows[target][cell]}` gets `{rows[source][other]}` (cell {other}) of rank {source}"
            help = f"rank {target} must receive from rank {source} in the order in which that sends"
            yield Problem(target, cell, why, help)


def _deadlocks(ways: _Ways) -> list[Problem]:
    """Cycles of ranks, each of which posted a batch with a message that matches only in another's next batch."""
    cells, rank = ways.cells, ways.cells.rank
    ends: list[list[int]] = [rank[ways.sent].tolist(), rank[ways.received].tolist()]
    rest, none = _batches(ways), list[int]()
    batch = [none] * len(rest)
    unmatched = [0] * len(rest)
    waiting: set[int] = set()  # posted by one of two ranks
    ready = deque(range(len(rest)))
    while ready:
        at = ready.popleft()
        batch[at] = next(rest[at], none)
        unmatched[at] = len(batch[at])
        for value in batch[at]:
            if value not in waiting:
                waiting.add(value)
                continue
            waiting.remove(value)
            for side in (ends[0][value], ends[1][value]):
                unmatched[side] -= 1
                if not unmatched[side]:
                    ready.append(side)
    waits: dict[Cell, Cell] = {}
    for here in (at for at, count in enumerate(unmatched) if count):
        value = next(value for value in batch[here] if value in waiting)
        sent, received = cells.cell(ways.sent[value]), cells.cell(ways.received[value])
        waits |= {sent: received} if sent.rank == here else {received: sent}
    help = "each is posted when the messages before it in its row are done; put one of them earlier"
    return circular(waits, cells.schedule, help) if waits else []


def _batches(ways: _Ways) -> list[Iterator[list[int]]]:
    """For each rank the values of messages that begin as one."""
    found: list[list[list[int]]] = [[] for _ in ways.cells.schedule.rows]
    numbers = np.flatnonzero(ways.known)
    rank, moved = ways.cells.rank[numbers], ways.moves[numbers]
    ranks: list[int] = rank.tolist()
    values: list[int] = moved.tolist()
    starts = np.flatnonzero(~_joins(ways, numbers, rank, moved)).tolist()
    for start, end in pairwise([*starts, len(values)]):
        found[ranks[start]].append(values[start:end])
    return [*map(iter, found)]


def _joins(ways: _Ways, numbers: Numbers, rank: Numbers, moved: Numbers) -> NDArray[np.bool_]:
    """Which messages begin with the one before: those that are neighbours in the rows of both their ranks.

    As the runtime has it (`pipeline.message_groups`): a backend may take a group for one, which is done when all of it
    is, so that it must be the same at both ends.
    """
    source, target = ways.cells.rank[ways.sent[moved]], ways.cells.rank[ways.received[moved]]
    peer = source + target - rank
    beside = (np.diff(numbers, prepend=-2) == 1) & (np.diff(rank, prepend=-1) == 0) & (np.diff(peer, prepend=-1) == 0)
    before = np.roll(moved, 1)
    pairs = (np.minimum(moved, before) * len(ways.moves) + np.maximum(moved, before))[beside]
    _, which, ends = np.unique(pairs, return_inverse=True, return_counts=True)
    joins = np.zeros(len(numbers), dtype=bool)
    joins[beside] = ends[which] == 2
    return joins
