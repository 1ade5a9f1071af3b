"""Rows with their messages, in an order that cannot deadlock; whether the messages of any rows all arrive.

A send comes right after the action that makes its value, a receive early.  Messages are matched first in first out for
each two ranks, even where a send blocks until it is received.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import groupby
from math import inf
from typing import NamedTuple

from attrs import field, frozen

from .actions import Action, Row, Schedule, Work
from .dependencies import Cell, Value, made_by, needs
from .timeline import Times, timed
from .violations import Problem, circular, lacking, misplaced


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


class _Event(NamedTuple):
    """An action or a message in the total order, which is the order of these tuples."""

    start: float
    """The value of the action, or of the one that makes the sent value."""
    order: float
    """Actions that take no time come before others that start with them, in an order in which they can be done."""
    is_message: bool
    rank: int
    what: Action | Message


def with_messages(schedule: Schedule, times: Times) -> Schedule:
    """The rows with a send right after each action whose value crosses, and its receive where that action begins.

    All actions and messages are in one total order, of which each row is a part; a message is one event of it on both
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
    return Schedule(schedule.stage_to_rank, schedule.microbatches, tuple(map(tuple, rows)))


def _events(schedule: Schedule, times: Times) -> Iterator[_Event]:
    for number, (step, slot) in enumerate(timed(schedule, times)):
        order = number if slot.start == slot.end else inf
        yield _Event(slot.start, order, False, step.cell.rank, step.action)
        if step.makes and (message := message_of(step.makes, schedule.stage_to_rank)):
            yield _Event(slot.start, order, True, step.cell.rank, message)


Cells = dict[Value, Cell]


@frozen
class Ways:
    """The cells at which values that cross from rank to rank are made, sent, received and first needed."""

    made: Cells = field(factory=Cells)
    sent: Cells = field(factory=Cells)
    received: Cells = field(factory=Cells)
    used: Cells = field(factory=Cells)


def rendezvous(schedule: Schedule) -> list[Problem]:
    """Problems of the messages of a schedule whose cells and order are right.

    Messages with no computing between them in a row are one batch: all are posted at once, and the row goes on when all
    are matched.
    """
    ways = _computed(schedule)
    if found := [*_superfluous(schedule, ways), *_lacking(schedule, ways)]:
        return found
    return [*_misordered(schedule, ways)] or [*_mismatched(schedule, ways)] or _deadlocks(schedule, ways)


def _computed(schedule: Schedule) -> Ways:
    """Where values that cross are made and needed."""
    ways = Ways()
    for rank, at, action in schedule.cells():
        if action.work.is_message:
            continue
        value = made_by(action)
        if value and message_of(value, schedule.stage_to_rank):
            ways.made[value] = Cell(rank, at)
        for value in needs(action, schedule.stages):
            if schedule.stage_to_rank[value.stage] != rank:
                ways.used[value] = Cell(rank, at)
    return ways


def _superfluous(schedule: Schedule, ways: Ways) -> Iterator[Problem]:
    """Messages that go nowhere, and those that a cell before is; the others are noted in `ways`."""
    for rank, at, action in schedule.cells():
        if not action.work.is_message:
            continue
        cell, value, sends = Cell(rank, at), carried(action), action.work.sends
        known = ways.sent if sends else ways.received
        if problem := misplaced(cell, action, schedule):
            yield problem
        elif value not in ways.made:
            why = f"`{action}`: no other rank has the stage {'to' if sends else 'from'} which this goes"
            yield Problem(*cell, why, "leave this cell out")
        elif value in known:
            why = f"`{action}`: cell {known[value].at} has done it"
            yield Problem(*cell, why, "leave one of the two cells out")
        else:
            known[value] = cell


def _lacking(schedule: Schedule, ways: Ways) -> list[Problem]:
    missing: list[tuple[int, Action]] = []
    for value in ways.made:
        if (value not in ways.sent or value not in ways.received) and (it := message_of(value, schedule.stage_to_rank)):
            missing += [(it.source, it.send)] if value not in ways.sent else []
            missing += [(it.target, it.receive)] if value not in ways.received else []
    return lacking(missing, "what a stage of another rank needs is sent once and received once")


def _misordered(schedule: Schedule, ways: Ways) -> Iterator[Problem]:
    """Sends before their value is made, and receives after the cell that needs it."""
    for value, cell in ways.sent.items():
        if cell.at < (made := ways.made[value]).at:
            why = f"{_said(cell, schedule)} comes before {_said(made, schedule)}, which computes what it sends"
            yield Problem(*cell, why, f"put it after cell {made.at}")
    for value, cell in ways.received.items():
        if cell.at > (used := ways.used[value]).at:
            why = f"{_said(cell, schedule)} comes after {_said(used, schedule)}, which needs what it receives"
            yield Problem(*cell, why, f"put it before cell {used.at}")


def _said(cell: Cell, schedule: Schedule) -> str:
    return f"`{schedule.rows[cell.rank][cell.at]}`"


def _mismatched(schedule: Schedule, ways: Ways) -> Iterator[Problem]:
    """For each two ranks the first receive that gets another value than it says."""
    pairs: dict[tuple[int, int], list[Value]] = defaultdict(list)
    for value, source in ways.sent.items():  # in the order of rows
        pairs[source.rank, ways.received[value].rank].append(value)
    for (source, target), values in pairs.items():
        arriving = sorted(values, key=lambda value: ways.received[value].at)
        for value, sent in zip(arriving, values, strict=True):
            if value != sent:
                cell, other = ways.received[value], ways.sent[sent]
                why = f"`{schedule.rows[target][cell.at]}` gets `{schedule.rows[source][other.at]}` (cell {other.at})"
                help = f"rank {target} must receive from rank {source} in the order in which that sends"
                yield Problem(*cell, f"{why} of rank {source}", help)
                break


def _deadlocks(schedule: Schedule, ways: Ways) -> list[Problem]:
    """Cycles of ranks, each of which posted a batch with a message that matches only in another's next batch."""
    none: list[Value] = []
    rest = [_batches(row) for row in schedule.rows]
    batch = [none] * schedule.ranks
    unmatched = [0] * schedule.ranks
    waiting: set[Value] = set()  # posted by one of two ranks
    ready = deque(range(schedule.ranks))
    while ready:
        rank = ready.popleft()
        batch[rank] = next(rest[rank], none)
        unmatched[rank] = len(batch[rank])
        for value in batch[rank]:
            if value not in waiting:
                waiting.add(value)
                continue
            waiting.remove(value)
            for side in (ways.sent[value].rank, ways.received[value].rank):
                unmatched[side] -= 1
                if not unmatched[side]:
                    ready.append(side)
    waits: dict[Cell, Cell] = {}
    for rank, count in enumerate(unmatched):
        if count:
            value = next(value for value in batch[rank] if value in waiting)
            ends = ways.sent[value], ways.received[value]
            here, there = ends if ends[0].rank == rank else ends[::-1]
            waits[here] = there
    help = "each is posted when the messages before it in its row are done; put one of them earlier"
    return circular(waits, schedule, help) if waits else []


def _batches(row: Row) -> Iterator[list[Value]]:
    """Messages with no computing between them."""
    for is_message, actions in groupby(row, lambda action: action.work.is_message):
        if is_message:
            yield list(map(carried, actions))
