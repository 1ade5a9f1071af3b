"""Whether the messages of any rows all arrive.  This imports numpy, as `cell_table` does."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from .actions import Action, Row, Schedule
from .cell_table import CellTable, Numbers, cell_table
from .dependencies import (
    Cell,
    Problem,
    find_misplacement,
    get_payload,
    problems_of_circles,
    problems_of_lacking_actions,
)
from .p2p import message_of


def rendezvous(schedule: Schedule) -> list[Problem]:
    """Problems of the messages of a schedule whose cells and order are right.

    Each group is one batch, the same at both its ends: all its messages are posted at once, and a
    row goes on when all are matched.
    """
    ways = _ways(cell_table(schedule))
    if problems := [*_superfluous(ways), *_lacking(ways)]:
        return problems
    if problems := [*_find_misordered(ways)] or [*_find_mismatches(ways)]:
        return problems
    batches = _batches(ways)
    return [*_one_sided(ways, batches)] or _deadlocks(ways, batches)


@frozen(eq=False)
class _Ways:
    """The cells that make, send, receive and need each value that crosses from rank to rank, by
    number.

    moves  the value that each cell moves
    known  the cells that send or receive a value first
    """

    cells: CellTable
    moves: Numbers
    is_first: NDArray[np.bool_]
    maker_of: Numbers
    send_of: Numbers
    receive_of: Numbers
    consumer_of: Numbers


def _ways(cells: CellTable) -> _Ways:
    moves = cells.message_values
    consumers = np.max(
        [cells.where_of(values, cells.is_made_elsewhere(values)) for values in cells.needed], axis=0
    )
    fit = np.flatnonzero(cells.is_own_work & (consumers[moves] >= 0))
    # the first cell for each value and each end of its message
    _, firsts = np.unique(2 * moves[fit] + cells.are_sends[fit], return_index=True)
    is_first = np.zeros(len(moves), dtype=bool)
    is_first[fit[firsts]] = True
    sent = cells.where_of(moves, is_first & cells.are_sends)
    received = cells.where_of(moves, is_first & ~cells.are_sends)
    return _Ways(cells, moves, is_first, cells.makers, sent, received, consumers)


def _superfluous(ways: _Ways) -> Iterator[Problem]:
    """Problems of messages that go nowhere, and of messages that an earlier cell is too."""
    for number in np.flatnonzero(ways.cells.are_messages & ~ways.is_first):
        cell, action = ways.cells.cell(number), ways.cells.action(number)
        value, sends = ways.moves[number], action.work.sends
        if problem := find_misplacement(cell, action, ways.cells.schedule):
            yield problem
        elif ways.consumer_of[value] < 0:
            preposition = "to" if sends else "from"
            why = f"`{action}`: no other rank has the stage {preposition} which this goes"
            yield Problem(*cell, why, "leave this cell out")
        else:
            number_by_value = ways.send_of if sends else ways.receive_of
            first = ways.cells.cell(number_by_value[value])
            why = f"`{action}`: cell {first.place} has done it"
            yield Problem(*cell, why, "leave one of the two cells out")


def _lacking(ways: _Ways) -> list[Problem]:
    """Problems of values that another rank needs and that no cell sends, or no cell receives."""
    missing: list[tuple[int, Action]] = []
    lost = np.flatnonzero((ways.consumer_of >= 0) & ((ways.send_of < 0) | (ways.receive_of < 0)))
    for value in sorted(lost, key=ways.maker_of.__getitem__):
        message = message_of(ways.cells.value(int(value)), ways.cells.schedule.stage_to_rank)
        if message and ways.send_of[value] < 0:
            missing.append((message.source, message.send))
        if message and ways.receive_of[value] < 0:
            missing.append((message.target, message.receive))
    return problems_of_lacking_actions(
        missing, "what a stage of another rank needs is sent once and received once"
    )


def _find_misordered(ways: _Ways) -> Iterator[Problem]:
    """Problems of sends before the cell that makes their value, and of receives after the cell
    that needs it.
    """
    cells, numbers = ways.cells, np.arange(len(ways.moves))
    too_early = ways.is_first & cells.are_sends & (numbers < ways.maker_of[ways.moves])
    for number in np.flatnonzero(too_early):
        maker = ways.maker_of[ways.moves[number]]
        why = (
            f"`{cells.action(number)}` comes before `{cells.action(maker)}`, which computes"
            " what it sends"
        )
        yield Problem(*cells.cell(number), why, f"put it after cell {cells.place[maker]}")
    too_late = ways.is_first & ~cells.are_sends & (numbers > ways.consumer_of[ways.moves])
    for number in np.flatnonzero(too_late):
        consumer = ways.consumer_of[ways.moves[number]]
        why = (
            f"`{cells.action(number)}` comes after `{cells.action(consumer)}`, which needs what it"
            " receives"
        )
        yield Problem(*cells.cell(number), why, f"put it before cell {cells.place[consumer]}")


def _find_mismatches(ways: _Ways) -> Iterator[Problem]:
    """For each two ranks the first receive that gets another value than it says."""
    cells, sent = ways.cells, np.flatnonzero(ways.is_first & ways.cells.are_sends)
    received = ways.receive_of[ways.moves[sent]]
    pairs = cells.rank[sent] * cells.schedule.ranks + cells.rank[received]
    for pair in dict.fromkeys(pairs.tolist()):
        leaving = np.flatnonzero(pairs == pair)
        arriving = leaving[np.argsort(received[leaving])]
        different = np.flatnonzero(leaving != arriving)
        if not len(different):
            continue
        first = different[0]
        target, cell = cells.cell(received[arriving[first]])
        source, other = cells.cell(sent[leaving[first]])
        rows = cells.schedule.rows
        why = f"`{rows[target][cell]}` gets `{rows[source][other]}` (cell {other}) of rank {source}"
        help = f"rank {target} must receive from rank {source} in the order in which that sends"
        yield Problem(target, cell, why, help)


def _one_sided(ways: _Ways, batches: Sequence[Sequence[Sequence[int]]]) -> Iterator[Problem]:
    """Problems of groups that are not batches of two ranks."""
    schedule = ways.cells.schedule
    ends = Counter(map(frozenset, chain.from_iterable(batches)))
    for group in schedule.groups:
        if ends[frozenset(_values(ways, group))] != 2:
            rank = schedule.stage_to_rank[group[0].stage]
            words = ", ".join(f"`{action}`" for action in group)
            why = f"{words} begin as one, which are not neighbours in two rows that begin them so"
            yield Problem(rank, schedule.rows[rank].index(group[0]), why, "have each begin alone")


def _deadlocks(ways: _Ways, batches: Sequence[Sequence[list[int]]]) -> list[Problem]:
    """Problems of circles of ranks: each posted a batch with a message that matches only in the
    next batch of another.
    """
    cells, rank_of_cell = ways.cells, ways.cells.rank
    senders: list[int] = rank_of_cell[ways.send_of].tolist()
    receivers: list[int] = rank_of_cell[ways.receive_of].tolist()
    later_batches, none = [*map(iter, batches)], list[int]()
    batch = [none] * len(later_batches)
    unmatched = [0] * len(later_batches)
    waiting: set[int] = set()  # posted by one of two ranks
    ready = deque(range(len(later_batches)))
    while ready:
        rank = ready.popleft()
        batch[rank] = next(later_batches[rank], none)
        unmatched[rank] = len(batch[rank])
        for value in batch[rank]:
            if value not in waiting:
                waiting.add(value)
                continue
            waiting.remove(value)
            for side in (senders[value], receivers[value]):
                unmatched[side] -= 1
                if not unmatched[side]:
                    ready.append(side)
    waits: dict[Cell, Cell] = {}
    for rank, count in enumerate(unmatched):
        if count:
            value = next(value for value in batch[rank] if value in waiting)
            sent, received = cells.cell(ways.send_of[value]), cells.cell(ways.receive_of[value])
            if sent.rank == rank:
                waits[sent] = received
            else:
                waits[received] = sent
    if not waits:
        return []
    help = "each is posted when the messages before it in its row are done; put one of them earlier"
    return problems_of_circles(waits, cells.schedule, help)


def _batches(ways: _Ways) -> list[list[list[int]]]:
    """For each rank the values of messages that begin as one."""
    batches: list[list[list[int]]] = [[] for _ in ways.cells.schedule.rows]
    numbers = np.flatnonzero(ways.is_first)
    rank, group = ways.cells.rank[numbers], _groups(ways)[numbers]
    ranks: list[int] = rank.tolist()
    values: list[int] = ways.moves[numbers].tolist()
    is_next_cell = np.diff(numbers, prepend=-2) == 1
    is_same_rank = np.diff(rank, prepend=-2) == 0
    is_same_group = np.diff(group, prepend=-2) == 0
    joins = (group >= 0) & is_next_cell & is_same_rank & is_same_group
    for start, end in pairwise([*np.flatnonzero(~joins).tolist(), len(values)]):
        batches[ranks[start]].append(values[start:end])
    return batches


def _groups(ways: _Ways) -> Numbers:
    """For each cell the number of its group, -1 for cells that begin alone."""
    groups = np.full((2, ways.cells.nothing + 1), -1)  # by end, receive or send, and value
    for number, group in enumerate(ways.cells.schedule.groups):
        groups[[int(action.work.sends) for action in group], _values(ways, group)] = number
    return groups[ways.cells.are_sends.astype(int), ways.moves]


def _values(ways: _Ways, group: Row) -> list[int]:
    """The values that a group moves; cells that move nothing have a value that nobody moves."""
    values: list[int] = []
    for action in group:
        if action.work.is_message:
            values.append(ways.cells.number(get_payload(action)))
        else:
            values.append(ways.cells.nothing)
    return values
