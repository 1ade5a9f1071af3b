"""Rows with their messages: sends right behind what makes a value, receives early, in an order that cannot deadlock.

Purpose: `with_messages`, and which values cross from rank to rank.  Non-goals: whether given rows' messages are right
(`rendezvous`).
"""

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from attrs import frozen

from .actions import Action, Schedule, Work
from .dependencies import Value
from .simulate import timed
from .timeline import Times


@frozen
class Message:
    """One value on its way from rank to rank."""

    source: int
    target: int
    send: Action
    receive: Action


def receiver(value: Value, homes: tuple[int, ...]) -> int | None:
    """The rank that a value goes to; none where its own rank has the stage that needs it, or no stage does."""
    to = value.stage - 1 if value.gradient else value.stage + 1
    return homes[to] if 0 <= to < len(homes) and homes[to] != homes[value.stage] else None


def message_of(value: Value, homes: tuple[int, ...]) -> Message | None:
    """How a value goes to the rank that waits for it, if another does."""
    target = receiver(value, homes)
    if target is None:
        return None
    gradient, stage, microbatch = value
    if gradient:
        send, receive, to = Work.SEND_BACKWARD, Work.RECEIVE_BACKWARD, stage - 1
    else:
        send, receive, to = Work.SEND_FORWARD, Work.RECEIVE_FORWARD, stage + 1
    return Message(homes[stage], target, Action(stage, send, microbatch), Action(to, receive, microbatch))


def carried(action: Action) -> Value:
    """The value that a send or receive moves."""
    match action.work:
        case Work.SEND_FORWARD:
            return Value(False, action.stage, action.microbatch)
        case Work.RECEIVE_FORWARD:
            return Value(False, action.stage - 1, action.microbatch)
        case Work.SEND_BACKWARD:
            return Value(True, action.stage, action.microbatch)
        case Work.RECEIVE_BACKWARD:
            return Value(True, action.stage + 1, action.microbatch)
        case _:
            raise ValueError(f"{action} moves nothing")


class _Event(NamedTuple):
    """An action or a message in the total order, which is the order of these tuples."""

    start: float
    """Of the action, or of that which makes what is sent."""
    turn: float
    """Actions that take no time stand before others that start with them, in an order in which they can be done."""
    is_message: bool
    rank: int
    what: Action | Message


def with_messages(schedule: Schedule, times: Times) -> Schedule:
    """The rows with a send right behind each action whose value crosses, and its receive where that action begins.

    All actions and messages stand in one total order, of which each row is a part; a message is one event of it on both
    its ranks.  So the first event that is not done can always be done, even if a send blocks until it is received, and
    two ranks see the messages between them in the same order.  Raises Stuck where rows wait for each other.
    """
    rows: list[list[Action]] = [[] for _ in schedule.rows]
    for event in sorted(_events(schedule, times)):
        if isinstance(event.what, Message):
            rows[event.what.source].append(event.what.send)
            rows[event.what.target].append(event.what.receive)
        else:
            rows[event.rank].append(event.what)
    return Schedule(schedule.homes, schedule.microbatches, tuple(map(tuple, rows)))


def _events(schedule: Schedule, times: Times) -> Iterator[_Event]:
    for number, (step, slot) in enumerate(timed(schedule, times)):
        turn = number if slot.start == slot.end else inf
        yield _Event(slot.start, turn, False, step.cell.rank, step.action)
        if step.makes and (message := message_of(step.makes, schedule.homes)):
            yield _Event(slot.start, turn, True, step.cell.rank, message)
