"""Which messages two ranks begin as one.  This imports numpy, as `cell_table` does."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .actions import Row
from .cell_table import CellTable, Numbers
from .dependencies import carried


def message_groups(cells: CellTable) -> tuple[Row, ...]:
    """Messages between the same two ranks that are neighbours in both rows, which are matched and in order.

    NCCL has one kernel for messages that begin as one, which is done when all of them are, and does not promise that
    they go on by themselves.  So a group is the same at both its ends; nothing lies between its messages on either
    rank, so that rows which are parts of one order of single messages are parts of one order of groups.  `rendezvous`
    proves it of the rows.
    """
    numbers = np.flatnonzero(cells.are_messages)
    moved = cells.values(lambda it: carried(it) if it.work.is_message else None)[numbers]
    ends = [*np.flatnonzero(~_joins(cells, numbers, moved)).tolist(), len(numbers)]
    spans = ((start, end) for start, end in pairwise(ends) if end - start > 1)
    return tuple(tuple(map(cells.action, numbers[start:end])) for start, end in spans)


def _joins(cells: CellTable, numbers: Numbers, moved: Numbers) -> NDArray[np.bool_]:
    """Which messages begin with the one before, given the values that all move."""
    rank = cells.rank[numbers]
    stages = cells.each(lambda it: it.peer if it.work.is_message else 0)[numbers]
    peer = np.array(cells.schedule.stage_to_rank)[stages]
    beside = (np.diff(numbers, prepend=-2) == 1) & (np.diff(rank, prepend=-1) == 0) & (np.diff(peer, prepend=-1) == 0)
    before = np.roll(moved, 1)
    pairs = (np.minimum(moved, before) * cells.nothing + np.maximum(moved, before))[beside]
    _, which, ends = np.unique(pairs, return_inverse=True, return_counts=True)
    joins = np.zeros(len(numbers), dtype=bool)
    joins[beside] = ends[which] == 2
    return joins
