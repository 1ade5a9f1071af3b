"""Rows with their messages, in an order that cannot deadlock; whether the messages of any rows all arrive.

A send comes right after the action that makes its value, a receive early.  Messages are matched first in first out for
each two ranks, even where a send blocks until it is received.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import groupby
from math import inf
from typing import TypeVar, cast

from attrs import field, frozen

from .actions import Action, Row, Schedule, Work
from .dependencies import Cell, Value, made_by, needs
from .timeline import Timed, Times, timed
from .violations import Problem, circular, lacking, misplaced

T = TypeVar("T", bound=Hashable)


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
    cells = found.cells
    ways = [message_of(made, schedule.stage_to_rank) if (made := made_by(action)) else None for action in cells.kinds]
    like: list[int] = cells.like.tolist()
    ranks: list[int] = cells.rank.tolist()
    actions = cells.actions
    rows: list[list[Action]] = [[] for _ in schedule.rows]
    for cell, is_message in _events(found, [way is not None for way in ways]):
        if not is_message:
            rows[ranks[cell]].append(actions[cell])
        elif way := ways[like[cell]]:
            microbatch = actions[cell].microbatch
            rows[way.source].append(Action(way.send.stage, way.send.work, microbatch))
            rows[way.target].append(Action(way.receive.stage, way.receive.work, microbatch))
    return Schedule(schedule.stage_to_rank, schedule.microbatches, tuple(map(tuple, rows)))


def _events(found: Timed, crosses: list[bool]) -> Iterator[tuple[int, bool]]:
    """All actions and messages in order, by the cell that computes them or what they send.

    Those that begin together, messages behind actions and then rank by rank; but actions that take no time come first,
    in an order in which they can be done, each with its message.
    """
    import numpy as np

    start, turn = np.array(found.start), np.empty(len(found.order))
    turn[found.order] = np.arange(len(turn))
    turn[start != found.end] = inf
    sends = np.flatnonzero(np.array(crosses, dtype=bool)[found.cells.like])
    cells = np.concatenate((np.arange(len(turn)), sends))
    is_message = np.arange(len(cells)) >= len(turn)
    events = np.lexsort((found.cells.rank[cells], is_message, turn[cells], start[cells]))
    return zip(cells[events].tolist(), is_message[events].tolist(), strict=True)


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
    """Circles of ranks that have posted a batch of which a message is not matched until another's next batch is."""
    ends = {value: (cell.rank, ways.received[value].rank) for value, cell in ways.sent.items()}
    waits: dict[Cell, Cell] = {}
    for rank, value in unmatched([_batches(row) for row in schedule.rows], ends).items():
        here, there = ways.sent[value], ways.received[value]
        waits |= {here: there} if here.rank == rank else {there: here}
    help = "each is posted when the messages before it in its row are done; put one of them earlier"
    return circular(waits, schedule, help) if waits else []


def unmatched(batches: Sequence[Iterator[list[T]]], ends: Mapping[T, tuple[int, int]]) -> dict[int, T]:
    """The ranks that wait forever in a batch of messages, and the first of these that is not matched.

    `batches` has those of each rank, which posts one when the one before is matched, and `ends` the two ranks of each.
    """
    batch: list[list[T]] = [[] for _ in batches]
    left = [0] * len(batches)
    waiting: set[T] = set()  # posted by one of two ranks
    ready = deque(range(len(batches)))
    while ready:
        rank = ready.popleft()
        batch[rank] = next(batches[rank], list[T]())
        left[rank] = len(batch[rank])
        for message in batch[rank]:
            if message not in waiting:
                waiting.add(message)
                continue
            waiting.remove(message)
            for side in ends[message]:
                left[side] -= 1
                if not left[side]:
                    ready.append(side)
    return {rank: next(filter(waiting.__contains__, batch[rank])) for rank, count in enumerate(left) if count}


def _batches(row: Row) -> Iterator[list[Value]]:
    """Messages with no computing between them."""
    for is_message, actions in groupby(row, lambda action: action.work.is_message):
        if is_message:
            yield list(map(carried, actions))
