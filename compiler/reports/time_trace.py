"""A predicted step as a trace: a process for each rank of a pipeline, in it a track for each
stream.

Ops are called by the plan's line, as in a trace that a run records (`SCALEC_PROFILE`), and have it
as `line`.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from ..analysis.time.clocks import GPU, HOST, Event, Stream
from ..analysis.time.events import ACTIONS
from ..ir import Program
from .chrome_trace import Event as Shown
from .chrome_trace import chrome_trace, process
from .summary import headline

MARK = "Written by scalec explain time"
"""A file with this mark is a trace that may be replaced."""

STEP = re.compile(r"step \d+")
"""The name of a step's span in a recorded trace."""

RECORDED = 1000
"""Processes of a recorded trace are numbered from here on, by rank."""

_UNIT = 1e6
"""Microseconds, in which the format counts."""


def time_trace(
    program: Program, events: Sequence[Sequence[Event]], beside: Iterable[Shown] = ()
) -> str:
    """The text of a trace file: the events of each rank along the pipeline's axis, then the
    events `beside` them.
    """
    processes: list[Iterator[Shown]] = []
    for rank, events_of_rank in enumerate(events):
        name = "predicted"
        if program.pipeline:
            name = f"predicted: {program.pipeline.axis} {rank}"
        processes.append(_rank(rank, name, events_of_rank))
    return chrome_trace(headline(program), MARK, chain(*processes, beside))


def get_recorded_step(rank: int, text: str) -> Iterator[Shown]:
    """The last step of a trace that a rank of a run has recorded, moved so that it begins at 0,
    in processes of its own.

    Raises ValueError, KeyError or TypeError where the text is no such trace.
    """
    events: list[Shown] = json.loads(text)["traceEvents"]
    begin, end = _last_step(events)
    names = {event["pid"]: event["args"]["name"] for event in events if _is_process_name(event)}
    numbers: dict[Any, int] = {}
    for event in events:
        numbers.setdefault(event.get("pid"), RECORDED * (rank + 1) + len(numbers))
    for event in events:
        if _is_process_name(event):
            name = f"recorded: rank {rank}, {names[event['pid']]}"
            yield {**event, "pid": numbers[event["pid"]], "args": {"name": name}}
        elif event["ph"] == "M":
            yield {**event, "pid": numbers[event.get("pid")]}
        elif event["ph"] in ("X", "s", "f") and begin <= event["ts"] <= end:
            start = round(event["ts"] - begin, 3)
            yield {**event, "pid": numbers[event["pid"]], "ts": start}


def _is_process_name(event: Shown) -> bool:
    return event["name"] == "process_name"


def _last_step(events: Sequence[Shown]) -> tuple[float, float]:
    """When the last step of a recorded trace begins and ends, in µs."""
    last: Shown | None = None
    for event in events:
        if event.get("cat") == "user_annotation" and STEP.fullmatch(event["name"]):
            last = event
    if last is None:
        raise ValueError("no step")
    return last["ts"], last["ts"] + last["dur"]


def _rank(rank: int, name: str, events: Sequence[Event]) -> Iterator[Shown]:
    """The process of a predicted rank."""
    streams = sorted({event.stream for event in events}, key=_order)
    yield from process(rank, name, map(_stream_name, streams))
    tracks = {stream: track for track, stream in enumerate(streams)}
    for event in events:
        if event.end <= event.begin:
            continue
        begin, end = round(event.begin * _UNIT, 3), round(event.end * _UNIT, 3)
        name = event.kind
        if event.line and event.stream != ACTIONS:
            name = f"{event.line}  {event.kind}"
        yield {
            "ph": "X",
            "pid": rank,
            "tid": tracks[event.stream],
            "ts": begin,
            "dur": round(end - begin, 3),
            "name": name,
            "cat": event.kind,
            "args": {"line": event.line},
        }


def _order(stream: Stream) -> tuple[int, str]:
    """The key that sorts streams: actions, the GPU, groups of ranks by their axes, the host."""
    order = [ACTIONS, GPU, "", HOST]
    if isinstance(stream, str):
        return order.index(stream), ""
    return order.index(""), _stream_name(stream)


def _stream_name(stream: Stream) -> str:
    return stream if isinstance(stream, str) else " × ".join(stream)
