"""Whether rows with messages are right, asked of all cells at once; `check` tells what is wrong with others.

This imports numpy, as `cell_table` does.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from attrs import frozen

from .actions import Schedule
from .cell_table import CellTable, Numbers, cell_table
from .dependencies import PARTS, Value, made_by
from .p2p import carried, unmatched


def is_sound(schedule: Schedule) -> bool:
    """Whether each part of the work is done once, by its rank, and ranks never wait for each other in a circle.

    They do not where an action comes after what it needs of its own rank, or after the receive of what it needs of
    another, which sends that after it has made it, and where all messages are matched: a rank waits for nothing else.
    """
    cells = cell_table(schedule)
    if not (_at_home(cells) and _whole(cells.computing) and _follow(cells.computing)):
        return False
    crossing = _crossing(cells.computing)
    return _moved_once(cells.messages, crossing) and _all_arrive(cells.messages, crossing)


def _at_home(cells: CellTable) -> bool:
    """Whether there are their stages, on their ranks, and their microbatches."""
    home = dict(enumerate(cells.schedule.stage_to_rank))
    is_own = cells.each(lambda action: home.get(action.stage, -1)) == cells.rank
    return bool(np.all(is_own & (cells.microbatch >= 0) & (cells.microbatch < cells.schedule.microbatches)))


def _whole(computing: CellTable) -> bool:
    """Whether each stage does each part of its work once for each microbatch."""
    return all(_once(computing, part) for part in "FIW")


def _once(computing: CellTable, part: str) -> bool:
    done = computing.where(computing.each(lambda action: part in PARTS[action.work]))
    found = done.values(lambda action: Value(False, action.stage, 0))
    return np.array_equal(np.sort(found), np.arange(done.nothing // 2))


def _follow(computing: CellTable) -> bool:
    """Whether each comes after what it needs of its own rank."""
    made = _places(computing, computing.values(made_by))
    made[computing.nothing] = -1
    return all(np.all((made[values] < computing.at) | computing.elsewhere(values)) for values in computing.needed)


@frozen(eq=False)
class _Crossing:
    """The values that another rank needs; where each is made and used, in their rows, and on which ranks."""

    values: Numbers
    made: Numbers
    used: Numbers
    source: Numbers
    target: Numbers


def _crossing(computing: CellTable) -> _Crossing:
    far = [computing.elsewhere(values) for values in computing.needed]
    values = np.concatenate([values[there] for values, there in zip(computing.needed, far, strict=True)])
    used, target = (np.concatenate([column[there] for there in far]) for column in (computing.at, computing.rank))
    made = _places(computing, computing.values(made_by))[values]
    schedule = computing.schedule
    source = np.array(schedule.stage_to_rank)[values // schedule.microbatches % schedule.stages]
    return _Crossing(values, made, used, source, target)


def _moved_once(messages: CellTable, crossing: _Crossing) -> bool:
    """Whether these are sent once and received once, and nothing else is."""
    moved, sends = messages.values(carried), messages.each(lambda action: action.work.sends)
    return all(np.array_equal(np.sort(moved[some]), np.sort(crossing.values)) for some in (sends, ~sends))


def _all_arrive(messages: CellTable, crossing: _Crossing) -> bool:
    """Whether all are made, sent, received and used in this order, and those of two ranks in the same order on both."""
    moved, sends = messages.values(carried), messages.each(lambda action: action.work.sends)
    sent, received = (_places(messages.where(some), moved[some])[crossing.values] for some in (sends, ~sends))
    ranks = crossing.source * messages.schedule.ranks + crossing.target
    ends = zip(crossing.source.tolist(), crossing.target.tolist(), strict=True)
    return bool(
        np.all((crossing.made < sent) & (received < crossing.used))
        and np.array_equal(np.lexsort((sent, ranks)), np.lexsort((received, ranks)))
        and not unmatched([*_batches(messages, moved)], dict(zip(crossing.values.tolist(), ends, strict=True)))
    )


def _batches(messages: CellTable, moved: Numbers) -> Iterator[Iterator[list[int]]]:
    """For each rank the values of its messages with no computing between them."""
    for row in messages.rows:
        values, at = moved[row.start : row.stop].tolist(), messages.at[row.start : row.stop]
        ends = [0, *(np.flatnonzero(np.diff(at) > 1) + 1).tolist(), len(values)]
        yield iter([values[start:end] for start, end in pairwise(ends)])


def _places(cells: CellTable, values: Numbers) -> Numbers:
    """For each value the place in its row of the cell that has it here."""
    places = np.full(cells.nothing + 1, -1)
    places[values] = cells.at
    return places
