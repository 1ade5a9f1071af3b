"""A predicted step as a trace: a process for each rank of a pipeline, in it a track for each stream.

Ops are called by the plan's line, as in a trace that a run records (`SCALEC_PROFILE`), and have it as `line`.
"""

from collections.abc import Iterator, Sequence

from ..analysis.time.clocks import GPU, HOST, Event, Stream
from ..analysis.time.events import ACTIONS
from ..ir import Program
from .chrome_trace import Event as Shown
from .chrome_trace import chrome_trace, process
from .summary import headline

MARK = "Written by scalec explain time"
"""By which a file is known to be one that may be replaced."""

_UNIT = 1e6
"""Microseconds, in which the format counts."""


def time_trace(program: Program, events: Sequence[Sequence[Event]]) -> str:
    """The text of a file, of the events of each rank along the pipeline's axis."""
    axis = program.pipeline.axis if program.pipeline else ""
    names = [f"predicted: {axis} {rank}" if axis else "predicted" for rank in range(len(events))]
    shown = (it for rank, own in enumerate(events) for it in _rank(rank, names[rank], own))
    return chrome_trace(headline(program), MARK, shown)


def _rank(rank: int, name: str, events: Sequence[Event]) -> Iterator[Shown]:
    streams = sorted({event.stream for event in events}, key=_order)
    yield from process(rank, name, map(_called, streams))
    tracks = {stream: track for track, stream in enumerate(streams)}
    for it in events:
        if it.end > it.begin:
            begin, end = round(it.begin * _UNIT, 3), round(it.end * _UNIT, 3)
            place = {"pid": rank, "tid": tracks[it.stream], "ts": begin, "dur": round(end - begin, 3)}
            name = it.kind if it.stream == ACTIONS or not it.line else f"{it.line}  {it.kind}"
            yield {"ph": "X", **place, "name": name, "cat": it.kind, "args": {"line": it.line}}


def _order(stream: Stream) -> tuple[int, str]:
    """Actions, the GPU, groups of ranks by their axes, the host."""
    order = [ACTIONS, GPU, "", HOST]
    return (order.index(stream), "") if isinstance(stream, str) else (order.index(""), _called(stream))


def _called(stream: Stream) -> str:
    return stream if isinstance(stream, str) else " × ".join(stream)
