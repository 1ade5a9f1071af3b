"""Rows with their messages, in an order that cannot deadlock; whether the messages of any rows all arrive.

A send comes right after the action that makes its value, a receive early.  Messages are matched first in first out for
each two ranks, even where a send blocks until it is received.
"""

from collections.abc import Iterator
from math import inf
from typing import cast

from attrs import frozen

from .actions import Action, Schedule, Work
from .dependencies import Value, made_by
from .timeline import Timed, Times, timed


@frozen
class Message:
    """One value on its way from rank to rank."""

    source: int
    target: int
    send: Action
    receive: Action


def message_of(value: Value, stage_to_rank: tuple[int, ...]) -> Message | None:
    """How a value goes to the rank that waits for it; none where its own rank does, or no stage does."""
    gradient, stage, microbatch = value
    send = Action(stage, Work.SEND_BACKWARD if gradient else Work.SEND_FORWARD, microbatch)
    receive = Action(send.peer, Work.RECEIVE_BACKWARD if gradient else Work.RECEIVE_FORWARD, microbatch)
    if not 0 <= send.peer < len(stage_to_rank) or stage_to_rank[send.peer] == stage_to_rank[stage]:
        return None
    return Message(stage_to_rank[stage], stage_to_rank[send.peer], send, receive)


def carried(message: Action) -> Value:
    """The value that a send or receive moves."""
    if not message.work.is_message:
        raise ValueError(f"{message} moves nothing")
    gradient = message.work in (Work.SEND_BACKWARD, Work.RECEIVE_BACKWARD)
    return Value(gradient, message.stage if message.work.sends else message.peer, message.microbatch)


def with_messages(schedule: Schedule, times: Times) -> Schedule:
    """The rows with a send right after each action whose value crosses, and its receive where that action begins.

    All actions and messages are in one total order, of which each row is a part; a message is one event of it on both
    its ranks.  So the first event that is not done can always be done, even if a send blocks until it is received, and
    two ranks see the messages between them in the same order.  Raises Stuck where rows wait for each other.
    """
    if times not in schedule.known:
        schedule.known[times] = _with_messages(schedule, timed(schedule, times))
    return cast(Schedule, schedule.known[times])


def _with_messages(schedule: Schedule, found: Timed) -> Schedule:
    rows: list[list[Action]] = [[] for _ in schedule.rows]
    like: list[int] = found.cells.like.tolist()
    made = [None if kind.work.is_message else made_by(kind) for kind in found.cells.kinds]
    ways = [message_of(value, schedule.stage_to_rank) if value else None for value in made]
    actions = [action for row in schedule.rows for action in row]
    for cell, is_message in _events(found, [way is not None for way in ways]):
        action, way = actions[cell], ways[like[cell]]
        if way and is_message:
            rows[way.source].append(Action(way.send.stage, way.send.work, action.microbatch))
            rows[way.target].append(Action(way.receive.stage, way.receive.work, action.microbatch))
        else:
            rows[schedule.stage_to_rank[action.stage]].append(action)
    return Schedule(schedule.stage_to_rank, schedule.microbatches, tuple(map(tuple, rows)))


def _events(found: Timed, crosses: list[bool]) -> Iterator[tuple[int, bool]]:
    """All actions and messages in order, by the cell that computes them or what they send.

    Those that begin together, messages behind actions and then rank by rank; but actions that take no time come first,
    in an order in which they can be done, each with its message.
    """
    import numpy as np

    start, order = np.array(found.start), np.array(found.order, dtype=np.int64)
    turn = np.empty(len(start))
    turn[order] = np.arange(len(order))
    turn[start != found.end] = inf
    cells = np.concatenate((order, np.flatnonzero(np.array(crosses, dtype=bool)[found.cells.like])))
    is_message = np.arange(len(cells)) >= len(order)
    events = np.lexsort((found.cells.rank[cells], is_message, turn[cells], start[cells]))
    return zip(cells[events].tolist(), is_message[events].tolist(), strict=True)
