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
from .dependencies import Value, get_result
from .timeline import CellTimes, Times, compute_times

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
    """The message that brings a value to the rank that waits for it; None where the value's own
    rank waits, or no stage waits.
    """
    gradient, stage, microbatch = value
    sending, receiving = Work.SEND_FORWARD, Work.RECEIVE_FORWARD
    if gradient:
        sending, receiving = Work.SEND_BACKWARD, Work.RECEIVE_BACKWARD
    send = Action(stage, sending, microbatch)
    receive = Action(send.peer, receiving, microbatch)
    if not 0 <= send.peer < len(stage_to_rank) or stage_to_rank[send.peer] == stage_to_rank[stage]:
        return None
    return Message(stage_to_rank[stage], stage_to_rank[send.peer], send, receive)


def with_messages(schedule: Schedule, times: Times) -> Schedule:
    """The rows with a send right after each action whose value crosses to another rank, and its
    receive where this action begins.

    All actions and messages are in one total order, and each row is a part of it; a message is one
    event of the order on both its ranks.  So the first event that is not done can always be done,
    even if a send blocks until it is received, and two ranks see the messages between them in the
    same order.  Raises Stuck where rows wait for each other.
    """
    if times not in schedule.known:
        schedule.known[times] = _in_order(_ends(schedule), compute_times(schedule, times))
    return cast(Schedule, schedule.known[times])


@once
def _ends(schedule: Schedule) -> "CellTable":
    """The actions that compute and both ends of each message; `at` is the number of the cell that
    computes the action, or the message's value.
    """
    import numpy as np

    from .cell_table import cell_table, code, make_table

    cells = cell_table(schedule)
    codes_by_kind = np.full((3, len(cells.kinds)), -1)  # of an action, its send, its receive
    for number, kind in enumerate(cells.kinds):
        if not kind.work.is_message:
            codes_by_kind[0, number] = code(kind)
            if (value := get_result(kind)) and (way := message_of(value, schedule.stage_to_rank)):
                codes_by_kind[1:, number] = code(way.send), code(way.receive)
    codes = codes_by_kind[:, cells.kind].ravel()
    there = np.flatnonzero(codes >= 0)
    numbers, codes = there % len(cells.kind), codes[there]
    ranks = np.array(schedule.stage_to_rank)[codes // len(Work)]
    return make_table(schedule, ranks, numbers, cells.microbatch[numbers], codes)


def _in_order(ends: "CellTable", times: CellTimes) -> Schedule:
    """The rows with actions and messages by when their computing action begins, messages after
    actions, then rank by rank.

    But actions that take no time come first, each with its message, in an order that lets each be
    done.
    """
    import numpy as np

    from .cell_table import cell_table, message_groups

    place = np.full(len(times.start), inf)
    place[times.order] = np.arange(len(times.order))
    place[times.start != times.end] = inf
    makers = ends.place
    order = np.lexsort(
        (times.cells.rank[makers], ends.are_messages, place[makers], times.start[makers], ends.rank)
    )
    cells = ends.select(order)
    starts = np.searchsorted(cells.rank, range(ends.schedule.ranks + 1))
    actions = [*map(ends.actions.__getitem__, order)]
    rows = (tuple(actions[start:end]) for start, end in pairwise(starts))
    cells = evolve(cells, place=np.arange(len(order)) - starts[cells.rank])
    schedule = evolve(ends.schedule, rows=tuple(rows), groups=message_groups(cells))
    schedule.known[cell_table] = evolve(cells, schedule=schedule)
    return schedule
