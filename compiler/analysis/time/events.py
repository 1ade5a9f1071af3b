"""The events of a predicted step: what each stream of each rank of a pipeline does when.

Iterations that were counted are there one by one, but for those of which there would be too many:
these are one event of each stream.
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
"""The stream of a pipeline's actions, whose ops are those of the GPU meanwhile."""

ITERATIONS = "iterations like the last"
"""The kind of an event that is several iterations, after their number."""

MOST = 200_000
"""How many events there are, about."""


def events_of(program: Program, on: Hardware, most: float = MOST) -> list[list[Event]]:
    """The events of each rank along the pipeline's axis, or of one rank, as the program begins
    them; about `most`.
    """
    if program.pipeline:
        rows = Rows(program, program.pipeline, on, record=True)
        return [[*_of_row(rows, rank, most / len(rows.ranks))] for rank in range(len(rows.ranks))]
    walk = Walk(program, on, prices(program, on), record=True)
    walk.step()
    return [[*expanded(walk.clocks.events or (), most)]]


def expanded(
    events: Sequence[Event | Again], most: float, shift: Mapping[Stream, float] | None = None
) -> Iterator[Event]:
    """Events with iterations that were counted, each stream's later; these are one event where
    they are over `most`.
    """
    for it, later in unrolled(events, most, shift or {}):
        yield from [it] if isinstance(it, Event) else _as_one(it, later)


def unrolled(
    events: Sequence[Event | Again], most: float, later: Mapping[Stream, float]
) -> Iterator[tuple[Event | Again, Mapping[Stream, float]]]:
    """Events, each stream's `later`, one by one but for iterations of more than `most`; these
    with how much later.
    """
    for it in events:
        if isinstance(it, Event):
            by = later.get(it.stream, 0.0)
            yield Event(it.stream, it.kind, it.line, it.begin + by, it.end + by, it.due + by), later
        elif it.times * count(it.events) > most:
            yield it, later
        else:
            for nth in range(1, it.times + 1):
                yield from unrolled(
                    it.events, most, {s: later.get(s, 0.0) + nth * by for s, by in it.shift.items()}
                )


def count(events: Sequence[Event | Again]) -> int:
    """How many events there are, one by one."""
    return sum(1 if isinstance(it, Event) else it.times * count(it.events) for it in events)


def _as_one(again: Again, later: Mapping[Stream, float]) -> Iterator[Event]:
    """An event of each stream that has any, from the end of its last one."""
    ends = {it.stream: it.end for it in expanded(again.events, 0.0)}
    for stream, by in again.shift.items():
        if by and stream in ends:
            begin = ends[stream] + later.get(stream, 0.0)
            yield Event(
                stream, f"{again.times} {ITERATIONS}", "", begin, begin + again.times * by, begin
            )


def _of_row(rows: Rows, rank: int, most: float) -> Iterator[Event]:
    """A rank's events before its row, in it and after it."""
    own, slots = rows.ranks[rank], rows.timeline.slots[rank]
    yield from expanded(own.before.events or (), most)
    free, waits = own.before.gpu, {begin: (end, move) for begin, end, move in rows.waits(rank)}
    whole = (
        sum(count(each.events or ()) for slot in slots for each in rows.clocks(slot.action)) <= most
    )
    for slot in slots:
        end, move = waits.get(free, (free, None))
        yield from _wait(
            free, end, move.waiting if move else BUBBLE, move.line if move else rows.line
        )
        yield from _wait(max(free, end), slot.start, BUBBLE, rows.line)
        yield Event(ACTIONS, str(slot.action), rows.line, slot.start, slot.end, slot.start)
        yield from _of_action(rows, slot, whole or slot.action.microbatch == 0)
        free = slot.end
    for begin, end, move in rows.reductions(rank):
        yield Event(move.sends[-1][0], move.kind, move.line, begin, end, begin)
        yield from _wait(free, end, move.waiting, move.line)
        free = max(free, end)
    yield from _wait(free, rows.reduced, BUBBLE, rows.line)
    yield from _later(own.after, rows.reduced, most)
    yield from _wait(rows.reduced + own.after.gpu, rows.seconds, BUBBLE, rows.line)


def _of_action(rows: Rows, slot: Slot, whole: bool) -> Iterator[Event]:
    """The ops of an action, or it as one."""
    begin = slot.start
    for clocks in rows.clocks(slot.action):
        if whole:
            yield from _later(clocks, begin, inf)
        elif clocks.gpu:
            yield Event(GPU, str(slot.action), rows.line, begin, begin + clocks.gpu, begin)
        begin += clocks.gpu


def _later(clocks: Clocks, begin: float, most: float) -> Iterator[Event]:
    return expanded(clocks.events or (), most, dict.fromkeys((GPU, HOST, *clocks.groups), begin))


def _wait(begin: float, end: float, kind: str, line: str) -> Iterator[Event]:
    if end > begin:
        yield Event(GPU, kind, line, begin, end, end)
