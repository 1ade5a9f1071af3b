"""A predicted step as a trace: a process for each rank of a pipeline, in it a track for each
stream.

Ops are called by the plan's line, as in a trace that a run records (`SCALEC_PROFILE`), and have it
as `line`.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from ..analysis.time.clocks import GPU, HOST, Event, Stream
from ..analysis.time.events import ACTIONS
from ..ir import Program
from .chrome_trace import Event as Shown
from .chrome_trace import chrome_trace, process
from .summary import headline

MARK = "Written by scalec explain time"
"""By which a file is known to be one that may be replaced."""

STEP = re.compile(r"step \d+")
"""The name of a step's span in a recorded trace."""

RECORDED = 1000
"""Processes of a recorded trace are numbered from here on, by rank."""

_UNIT = 1e6
"""Microseconds, in which the format counts."""


def time_trace(
    program: Program, events: Sequence[Sequence[Event]], beside: Iterable[Shown] = ()
) -> str:
    """The text of a file, of the events of each rank along the pipeline's axis, and of others
    `beside` them.
    """
    axis = program.pipeline.axis if program.pipeline else ""
    names = [f"predicted: {axis} {rank}" if axis else "predicted" for rank in range(len(events))]
    shown = (it for rank, own in enumerate(events) for it in _rank(rank, names[rank], own))
    return chrome_trace(headline(program), MARK, chain(shown, beside))


def recorded(rank: int, text: str) -> Iterator[Shown]:
    """The last step of the trace that a rank of a run has recorded, which begins at 0, in processes
    of their own.

    Raises ValueError, KeyError or TypeError where it is no such trace.
    """
    found: list[Shown] = json.loads(text)["traceEvents"]
    steps = [
        it for it in found if it.get("cat") == "user_annotation" and STEP.fullmatch(it["name"])
    ]
    if not steps:
        raise ValueError("no step")
    begin, end = steps[-1]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
    names = {it["pid"]: it["args"]["name"] for it in found if it["name"] == "process_name"}
    numbers = {
        pid: RECORDED * (rank + 1) + at
        for at, pid in enumerate(dict.fromkeys(it.get("pid") for it in found))
    }
    for it in found:
        if it["name"] == "process_name":
            named = f"recorded: rank {rank}, {names[it['pid']]}"
            yield {**it, "pid": numbers[it["pid"]], "args": {"name": named}}
        elif it["ph"] == "M":
            yield {**it, "pid": numbers[it.get("pid")]}
        elif it["ph"] in ("X", "s", "f") and begin <= it["ts"] <= end:
            yield {**it, "pid": numbers[it["pid"]], "ts": round(it["ts"] - begin, 3)}


def _rank(rank: int, name: str, events: Sequence[Event]) -> Iterator[Shown]:
    streams = sorted({event.stream for event in events}, key=_order)
    yield from process(rank, name, map(_called, streams))
    tracks = {stream: track for track, stream in enumerate(streams)}
    for it in events:
        if it.end > it.begin:
            begin, end = round(it.begin * _UNIT, 3), round(it.end * _UNIT, 3)
            place = {
                "pid": rank,
                "tid": tracks[it.stream],
                "ts": begin,
                "dur": round(end - begin, 3),
            }
            name = it.kind if it.stream == ACTIONS or not it.line else f"{it.line}  {it.kind}"
            yield {"ph": "X", **place, "name": name, "cat": it.kind, "args": {"line": it.line}}


def _order(stream: Stream) -> tuple[int, str]:
    """Actions, the GPU, groups of ranks by their axes, the host."""
    order = [ACTIONS, GPU, "", HOST]
    return (
        (order.index(stream), "") if isinstance(stream, str) else (order.index(""), _called(stream))
    )


def _called(stream: Stream) -> str:
    return stream if isinstance(stream, str) else " × ".join(stream)
