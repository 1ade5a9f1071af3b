"""The events of a predicted step: what each stream of each rank of a pipeline does when.

Iterations that were counted are there one by one.  Where there would be too many, they are one
event of each stream.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import inf

from ...ir import Program
from ...schedules.timeline import Slot
from ..hardware import Hardware
from .clocks import BUBBLE, GPU, HOST, Again, Clocks, Event, Stream
from .pipeline import Rows
from .prices import prices
from .timeline import Walk

ACTIONS = "actions"
"""The stream of a pipeline's actions; their ops are in the stream of the GPU."""

ITERATIONS = "iterations like the last"
"""The kind of an event that is several iterations, after their number."""

MOST = 200_000
"""How many events there are, about."""


def events_of(program: Program, on: Hardware, most: float = MOST) -> list[list[Event]]:
    """The events of each rank along the pipeline's axis, or of one rank, as the program begins
    them; about `most`.
    """
    if not program.pipeline:
        walk = Walk(program, on, prices(program, on), record=True)
        walk.step()
        return [[*get_expanded_events(walk.clocks.events or (), most)]]
    rows = Rows(program, program.pipeline, on, record=True)
    ranks = len(rows.ranks)
    return [[*_row_events(rows, rank, most / ranks)] for rank in range(ranks)]


def get_expanded_events(
    events: Sequence[Event | Again], most: float, shift: Mapping[Stream, float] | None = None
) -> Iterator[Event]:
    """Events with iterations that were counted, each stream's later by `shift`.

    Iterations of more than `most` events are one event of each stream.
    """
    for event, later in get_unrolled_events(events, most, shift or {}):
        if isinstance(event, Event):
            yield event
        else:
            yield from _as_one(event, later)


def get_unrolled_events(
    events: Sequence[Event | Again], most: float, later: Mapping[Stream, float]
) -> Iterator[tuple[Event | Again, Mapping[Stream, float]]]:
    """Events one by one, each stream's `later`, with how much later.

    Iterations of more than `most` events stay an `Again`, as they were.
    """
    for event in events:
        if isinstance(event, Event):
            by = later.get(event.stream, 0.0)
            begin, end, due = event.begin + by, event.end + by, event.due + by
            yield Event(event.stream, event.kind, event.line, begin, end, due), later
        elif event.times * count(event.events) > most:
            yield event, later
        else:
            for nth in range(1, event.times + 1):
                nth_later: dict[Stream, float] = {}
                for stream, by in event.shift.items():
                    nth_later[stream] = later.get(stream, 0.0) + nth * by
                yield from get_unrolled_events(event.events, most, nth_later)


def count(events: Sequence[Event | Again]) -> int:
    """How many events there are, one by one."""
    total = 0
    for event in events:
        if isinstance(event, Event):
            total += 1
        else:
            total += event.times * count(event.events)
    return total


def _as_one(again: Again, later: Mapping[Stream, float]) -> Iterator[Event]:
    """An event of each stream that has any, from the end of its last one."""
    ends = {event.stream: event.end for event in get_expanded_events(again.events, 0.0)}
    kind = f"{again.times} {ITERATIONS}"
    for stream, by in again.shift.items():
        if by and stream in ends:
            begin = ends[stream] + later.get(stream, 0.0)
            yield Event(stream, kind, "", begin, begin + again.times * by, begin)


def _row_events(rows: Rows, rank: int, most: float) -> Iterator[Event]:
    """A rank's events before its row, in it and after it."""
    work, slots = rows.ranks[rank], rows.timeline.slots[rank]
    yield from get_expanded_events(work.before.events or (), most)
    free = work.before.gpu
    waits = {begin: (end, move) for begin, end, move in rows.waits(rank)}
    is_whole = _count_of_slots(rows, slots) <= most
    for slot in slots:
        waited = free
        if free in waits:
            waited, move = waits[free]
            yield from _wait(free, waited, move.waiting, move.line)
        yield from _wait(max(free, waited), slot.start, BUBBLE, rows.line)
        yield Event(ACTIONS, str(slot.action), rows.line, slot.start, slot.end, slot.start)
        yield from _action_events(rows, slot, is_whole or slot.action.microbatch == 0)
        free = slot.end
    for begin, end, move in rows.reductions(rank):
        yield Event(move.sends[-1][0], move.kind, move.line, begin, end, begin)
        yield from _wait(free, end, move.waiting, move.line)
        free = max(free, end)
    yield from _wait(free, rows.reduced, BUBBLE, rows.line)
    yield from _later_events(work.after, rows.reduced, most)
    yield from _wait(rows.reduced + work.after.gpu, rows.seconds, BUBBLE, rows.line)


def _count_of_slots(rows: Rows, slots: Sequence[Slot]) -> int:
    """How many events the actions of a row have, one by one."""
    total = 0
    for slot in slots:
        for clocks in rows.clocks(slot.action):
            total += count(clocks.events or ())
    return total


def _action_events(rows: Rows, slot: Slot, whole: bool) -> Iterator[Event]:
    """The ops of an action, or the action as one event."""
    begin = slot.start
    for clocks in rows.clocks(slot.action):
        if whole:
            yield from _later_events(clocks, begin, inf)
        elif clocks.gpu:
            yield Event(GPU, str(slot.action), rows.line, begin, begin + clocks.gpu, begin)
        begin += clocks.gpu


def _later_events(clocks: Clocks, begin: float, most: float) -> Iterator[Event]:
    return get_expanded_events(
        clocks.events or (), most, dict.fromkeys((GPU, HOST, *clocks.groups), begin)
    )


def _wait(begin: float, end: float, kind: str, line: str) -> Iterator[Event]:
    if end > begin:
        yield Event(GPU, kind, line, begin, end, end)
