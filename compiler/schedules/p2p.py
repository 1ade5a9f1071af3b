"""Rows with their messages, in an order that cannot deadlock; whether the messages of any rows all
arrive.

A send comes right after the action that makes its value, a receive early.  Messages are matched
first in first out for each two ranks, even where a send blocks until it is received.
"""

from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, cast

from attrs import evolve, frozen

from .actions import Action, Schedule, Work, once
from .dependencies import Value, made_by
from .timeline import Timed, Times, timed

if TYPE_CHECKING:
    from .cell_table import CellTable


@frozen
class Message:
    """One value on its way from rank to rank."""

    source: int
    target: int
    send: Action
    receive: Action


def message_of(value: Value, stage_to_rank: tuple[int, ...]) -> Message | None:
    """How a value goes to the rank that waits for it; none where its own rank does, or no stage
    does.
    """
    gradient, stage, microbatch = value
    send = Action(stage, Work.SEND_BACKWARD if gradient else Work.SEND_FORWARD, microbatch)
    receive = Action(
        send.peer, Work.RECEIVE_BACKWARD if gradient else Work.RECEIVE_FORWARD, microbatch
    )
    if not 0 <= send.peer < len(stage_to_rank) or stage_to_rank[send.peer] == stage_to_rank[stage]:
        return None
    return Message(stage_to_rank[stage], stage_to_rank[send.peer], send, receive)


def with_messages(schedule: Schedule, times: Times) -> Schedule:
    """The rows with a send right after each action whose value crosses, and its receive where that
    action begins.

    All actions and messages are in one total order, of which each row is a part; a message is one
    event of it on both its ranks.  So the first event that is not done can always be done, even if
    a send blocks until it is received, and two ranks see the messages between them in the same
    order.  Raises Stuck where rows wait for each other.
    """
    if times not in schedule.known:
        schedule.known[times] = _in_order(_ends(schedule), timed(schedule, times))
    return cast(Schedule, schedule.known[times])


@once
def _ends(schedule: Schedule) -> "CellTable":
    """The actions that compute and both ends of each message; `at` is the number of the cell
    that does or makes it.
    """
    import numpy as np

    from .cell_table import cell_table, code, coded

    cells = cell_table(schedule)
    each = np.full((3, len(cells.kinds)), -1)
    for number, kind in enumerate(cells.kinds):
        if not kind.work.is_message:
            each[0, number] = code(kind)
            if (value := made_by(kind)) and (way := message_of(value, schedule.stage_to_rank)):
                each[1:, number] = code(way.send), code(way.receive)
    codes = each[:, cells.like].ravel()
    there = np.flatnonzero(codes >= 0)
    of, codes = there % len(cells.like), codes[there]
    ranks = np.array(schedule.stage_to_rank)[codes // len(Work)]
    return coded(schedule, ranks, of, cells.microbatch[of], codes)


def _in_order(ends: "CellTable", found: Timed) -> Schedule:
    """By when what they are of begins, messages after actions, then rank by rank.

    But actions that take no time come first, in an order in which they can be done, each with its
    message.
    """
    import numpy as np

    from .cell_table import cell_table, message_groups

    place = np.full(len(found.start), inf)
    place[found.order] = np.arange(len(found.order))
    place[found.start != found.end] = inf
    of = ends.at
    order = np.lexsort(
        (found.cells.rank[of], ends.are_messages, place[of], found.start[of], ends.rank)
    )
    cells = ends.where(order)
    starts = np.searchsorted(cells.rank, range(ends.schedule.ranks + 1))
    actions = [*map(ends.actions.__getitem__, order)]
    rows = (tuple(actions[start:end]) for start, end in pairwise(starts))
    cells = evolve(cells, at=np.arange(len(order)) - starts[cells.rank])
    made = evolve(ends.schedule, rows=tuple(rows), groups=message_groups(cells))
    made.known[cell_table] = evolve(cells, schedule=made)
    return made
