"""Adds plan lines to a profiler's trace where torch does not know them: in backward and on the GPU.

torch draws an arrow from each op of forward to the node of backward that it made (category `fwdbwd`), and gives kernels
the id of the op that started them.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

Event = dict[str, Any]
"""As the Chrome trace format has it: times in µs, `ph` X for what has a duration `dur`."""

_NODE = "autograd::engine::evaluate_function: "
_ACCUMULATES = f"{_NODE}torch::autograd::AccumulateGrad"  # has no op of forward: it follows the node that feeds it
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}


def add_lines(trace: dict[str, Any], lines: Mapping[str, str]) -> None:
    """Adds to a trace which of the `lines`, the names of spans in it, what belongs to: their values, in `args`.

    Consecutive nodes of backward that belong to one line become a span too, `backward of` the line.
    """
    events: list[Event] = trace["traceEvents"]
    spans = [event for event in events if event.get("cat") == "user_annotation" and event["name"] in lines]
    back = list(_backward(events, _Cover(spans)))
    cover = _Cover([*spans, *back])
    owners: dict[int, str] = {}
    for op in (event for event in events if event.get("cat") == "cpu_op"):
        if line := cover.at(op["pid"], op["tid"], op["ts"]):
            owners[op["args"]["External id"]] = op["args"]["line"] = lines[line.removeprefix("backward of ")]
    for event in events:
        if event.get("cat") in ON_GPU and (line := owners.get(event["args"].get("External id"))):
            event["args"]["line"] = line
    events += back


def _backward(events: Iterable[Event], forward: "_Cover") -> Iterator[Event]:
    """A span for each run of nodes, of one thread, that belong to one line."""
    made = {event["id"]: event for event in events if event.get("cat") == "fwdbwd" and event["ph"] == "s"}
    arrows = [event for event in events if event.get("cat") == "fwdbwd" and event["ph"] == "f" and event["id"] in made]
    nodes = [event for event in events if event.get("cat") == "cpu_op" and event["name"].startswith(_NODE)]
    for (pid, tid), of_thread in _by_thread(nodes):
        ends = sorted((arrow["ts"], arrow["id"]) for arrow in arrows if (arrow["pid"], arrow["tid"]) == (pid, tid))
        told: list[tuple[str, Event]] = []
        for node in of_thread:
            at = bisect_right(ends, (_end(node), len(made) + 1)) - 1
            line = told[-1][0] if told and node["name"] == _ACCUMULATES else ""
            if at >= 0 and ends[at][0] >= node["ts"]:
                start = made[ends[at][1]]
                line = forward.at(start["pid"], start["tid"], start["ts"])
            told.append((line, node))
        for line, run in groupby(told, key=lambda each: each[0]):
            if line:
                nodes = [node for _, node in run]
                yield _span(f"backward of {line}", nodes[0], nodes[-1])


def _span(name: str, first: Event, last: Event) -> Event:
    place = {key: first[key] for key in ("pid", "tid", "ts")}
    return {"ph": "X", "cat": "user_annotation", "name": name, **place, "dur": _end(last) - first["ts"], "args": {}}


def _end(event: Event) -> float:
    return event["ts"] + event["dur"]


def _by_thread(events: Iterable[Event]) -> Iterator[tuple[tuple[Any, Any], list[Event]]]:
    """The events of each thread, outer ones before those within them."""

    def thread(event: Event) -> tuple[Any, Any]:
        return event["pid"], event["tid"]

    ordered = sorted(events, key=lambda event: (str(thread(event)), event["ts"], -event["dur"]))
    for key, of_thread in groupby(ordered, key=thread):
        yield key, list(of_thread)


class _Change(NamedTuple):
    """From this time on, the innermost span has this name, empty outside of any."""

    time: float
    name: str


class _Cover:
    """Which of the spans, nested within each thread, is the innermost at a time."""

    def __init__(self, spans: Iterable[Event]) -> None:
        self._changes = {thread: list(_changes(of_thread)) for thread, of_thread in _by_thread(spans)}

    def at(self, pid: Any, tid: Any, time: float) -> str:
        """Its name; empty if there is none."""
        changes = self._changes.get((pid, tid), [])
        at = bisect_right(changes, time, key=lambda change: change.time)
        return changes[at - 1].name if at else ""


def _changes(spans: Iterable[Event]) -> Iterator[_Change]:
    around: list[Event] = []

    def leave(time: float) -> Iterator[_Change]:
        while around and _end(around[-1]) <= time:
            left = around.pop()
            yield _Change(_end(left), around[-1]["name"] if around else "")

    for span in spans:
        yield from leave(span["ts"])
        around.append(span)
        yield _Change(span["ts"], span["name"])
    yield from leave(float("inf"))
