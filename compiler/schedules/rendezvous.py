"""Whether the messages of any rows all arrive.  This imports numpy, as `cell_table` does."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from .actions import Action, Row, Schedule
from .cell_table import CellTable, Numbers, cell_table
from .dependencies import Cell, Problem, carried, circular, lacking, misplaced
from .p2p import message_of


def rendezvous(schedule: Schedule) -> list[Problem]:
    """Problems of the messages of a schedule whose cells and order are right.

    Each group is one batch, the same at both its ends: all are posted at once, and a row goes on
    when all are matched.
    """
    ways = _ways(cell_table(schedule))
    if found := [*_superfluous(ways), *_lacking(ways)]:
        return found
    if found := [*_misordered(ways)] or [*_mismatched(ways)]:
        return found
    batches = _batches(ways)
    return [*_one_sided(ways, batches)] or _deadlocks(ways, batches)


@frozen(eq=False)
class _Ways:
    """Where each value that crosses from rank to rank is made, sent, received and needed, by the
    numbers of cells.

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
    used = np.max(
        [cells.where_of(values, cells.elsewhere(values)) for values in cells.needed], axis=0
    )
    fit = np.flatnonzero(cells.at_home & (used[moves] >= 0))
    known = np.zeros(len(moves), dtype=bool)
    known[fit[np.unique(2 * moves[fit] + cells.are_sends[fit], return_index=True)[1]]] = True
    sent, received = (
        cells.where_of(moves, known & end) for end in (cells.are_sends, ~cells.are_sends)
    )
    return _Ways(cells, moves, known, cells.makers, sent, received, used)


def _superfluous(ways: _Ways) -> Iterator[Problem]:
    """Messages that go nowhere, and those that a cell before is."""
    for number in np.flatnonzero(ways.cells.are_messages & ~ways.known):
        cell, action = ways.cells.cell(number), ways.cells.action(number)
        value, sends = ways.moves[number], action.work.sends
        if problem := misplaced(cell, action, ways.cells.schedule):
            yield problem
        elif ways.used[value] < 0:
            why = (
                f"`{action}`: no other rank has the stage {'to' if sends else 'from'} which"
                " this goes"
            )
            yield Problem(*cell, why, "leave this cell out")
        else:
            first = ways.cells.cell((ways.sent if sends else ways.received)[value])
            yield Problem(
                *cell, f"`{action}`: cell {first.at} has done it", "leave one of the two cells out"
            )


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
    for number in np.flatnonzero(
        ways.known & ways.cells.are_sends & (every < ways.made[ways.moves])
    ):
        made = ways.made[ways.moves[number]]
        why = (
            f"`{cells.action(number)}` comes before `{cells.action(made)}`, which computes"
            " what it sends"
        )
        yield Problem(*cells.cell(number), why, f"put it after cell {cells.at[made]}")
    for number in np.flatnonzero(
        ways.known & ~ways.cells.are_sends & (every > ways.used[ways.moves])
    ):
        used = ways.used[ways.moves[number]]
        why = (
            f"`{cells.action(number)}` comes after `{cells.action(used)}`, which needs what it"
            " receives"
        )
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
            (target, cell), (source, other) = (
                cells.cell(received[arriving[at]]),
                cells.cell(sent[leaving[at]]),
            )
            rows = cells.schedule.rows
            why = (
                f"`{rows[target][cell]}` gets `{rows[source][other]}` (cell {other}) of rank"
                f" {source}"
            )
            help = f"rank {target} must receive from rank {source} in the order in which that sends"
            yield Problem(target, cell, why, help)


def _one_sided(ways: _Ways, batches: Sequence[Sequence[Sequence[int]]]) -> Iterator[Problem]:
    """Groups that are not as they are in the rows of two ranks."""
    schedule, ends = (
        ways.cells.schedule,
        Counter(frozenset(batch) for row in batches for batch in row),
    )
    for group in schedule.groups:
        if ends[frozenset(_values(ways, group))] != 2:
            rank, said = (
                schedule.stage_to_rank[group[0].stage],
                ", ".join(f"`{action}`" for action in group),
            )
            why = f"{said} begin as one, which are not neighbours in two rows that begin them so"
            yield Problem(rank, schedule.rows[rank].index(group[0]), why, "have each begin alone")


def _deadlocks(ways: _Ways, batches: Sequence[Sequence[list[int]]]) -> list[Problem]:
    """Cycles of ranks, each of which posted a batch with a message that matches only in
    another's next batch.
    """
    cells, rank = ways.cells, ways.cells.rank
    ends: list[list[int]] = [rank[ways.sent].tolist(), rank[ways.received].tolist()]
    rest, none = [*map(iter, batches)], list[int]()
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


def _batches(ways: _Ways) -> list[list[list[int]]]:
    """For each rank the values of messages that begin as one."""
    found: list[list[list[int]]] = [[] for _ in ways.cells.schedule.rows]
    numbers = np.flatnonzero(ways.known)
    rank, group = ways.cells.rank[numbers], _groups(ways)[numbers]
    ranks: list[int] = rank.tolist()
    values: list[int] = ways.moves[numbers].tolist()
    same = (
        np.diff(each, prepend=-2) == step for each, step in ((numbers, 1), (rank, 0), (group, 0))
    )
    joins = (group >= 0) & np.all([*same], axis=0)
    for start, end in pairwise([*np.flatnonzero(~joins).tolist(), len(values)]):
        found[ranks[start]].append(values[start:end])
    return found


def _groups(ways: _Ways) -> Numbers:
    """For each cell the number of its group, -1 for those that begin alone."""
    of = np.full((2, ways.cells.nothing + 1), -1)
    for number, group in enumerate(ways.cells.schedule.groups):
        of[[int(action.work.sends) for action in group], _values(ways, group)] = number
    return of[ways.cells.are_sends.astype(int), ways.moves]


def _values(ways: _Ways, group: Row) -> list[int]:
    """The values that a group moves; cells that move nothing have one that nobody moves."""
    nothing = ways.cells.nothing
    return [
        ways.cells.number(carried(action)) if action.work.is_message else nothing
        for action in group
    ]
