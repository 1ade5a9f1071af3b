"""Adds plan lines to a profiler's trace where torch does not know them: in backward and on the GPU.

torch draws an arrow from each op of forward to the node of backward that it made (category
`fwdbwd`), and gives kernels the id of the op that started them.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from heapq import heappop, heappush
from itertools import groupby
from typing import Any, NamedTuple

Event = dict[str, Any]
"""As the Chrome trace format has it: times in µs, `ph` X for what has a duration `dur`."""

_NODE = "autograd::engine::evaluate_function: "
# has no op of forward: it follows the node that feeds it
_ACCUMULATES = f"{_NODE}torch::autograd::AccumulateGrad"
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}


def add_lines(trace: dict[str, Any], lines: Mapping[str, str]) -> None:
    """Adds to a trace which of the `lines`, the names of spans in it, what belongs to: their
    values, in `args`.

    Consecutive nodes of backward that belong to one line become a span too, `backward of` the line.
    """
    events: list[Event] = trace["traceEvents"]
    spans = [
        event
        for event in events
        if event.get("cat") == "user_annotation" and event["name"] in lines
    ]
    back = list(_backward(events, _Cover(spans)))
    cover = _Cover([*spans, *back])
    owners: dict[int, str] = {}
    for op in (event for event in events if event.get("cat") == "cpu_op"):
        if line := cover.at(op["pid"], op["tid"], op["ts"]):
            owners[op["args"]["External id"]] = op["args"]["line"] = lines[
                line.removeprefix("backward of ")
            ]
    for event in events:
        if event.get("cat") in ON_GPU and (line := owners.get(event["args"].get("External id"))):
            event["args"]["line"] = line
    events += back


def _backward(events: Iterable[Event], forward: "_Cover") -> Iterator[Event]:
    """A span for each run of nodes, of one thread, that belong to one line."""
    made = {
        event["id"]: event
        for event in events
        if event.get("cat") == "fwdbwd" and event["ph"] == "s"
    }
    arrows = [
        event
        for event in events
        if event.get("cat") == "fwdbwd" and event["ph"] == "f" and event["id"] in made
    ]
    nodes = [
        event
        for event in events
        if event.get("cat") == "cpu_op" and event["name"].startswith(_NODE)
    ]
    nodes.sort(key=lambda node: (f"{node['pid']} {node['tid']}", node["ts"], -node["dur"]))
    for (pid, tid), of_thread in groupby(nodes, key=lambda node: (node["pid"], node["tid"])):
        ends = sorted(
            (arrow["ts"], arrow["id"])
            for arrow in arrows
            if (arrow["pid"], arrow["tid"]) == (pid, tid)
        )
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
                own = [node for _, node in run]
                span = {key: own[0][key] for key in ("pid", "tid", "ts")} | {
                    "dur": _end(own[-1]) - own[0]["ts"]
                }
                yield {
                    "ph": "X",
                    "cat": "user_annotation",
                    "name": f"backward of {line}",
                    **span,
                    "args": {},
                }


def _end(event: Event) -> float:
    return event["ts"] + event["dur"]


class Busy(NamedTuple):
    """A stretch of time.

    Where several overlap, the one of least `order` counts, and of these the innermost: the last to
    start, then the first to end, then the last listed.
    """

    order: int
    start: float
    end: float
    of: Any


def busy(event: Event, of: Any, order: int = 0) -> Busy:
    """The stretch of an event."""
    return Busy(order, event["ts"], _end(event), of)


def changes(stretches: Iterable[Busy]) -> Iterator[tuple[float, Any]]:
    """From each time on, what counts: None where nothing does."""
    ordered = sorted(stretches, key=lambda it: (it.start, -it.end))
    active, at = list[tuple[int, float, int]](), 0
    for time in sorted({time for it in ordered for time in (it.start, it.end)}):
        while at < len(ordered) and ordered[at].start <= time:
            heappush(active, (ordered[at].order, -ordered[at].start, -at))
            at += 1
        while active and ordered[-active[0][2]].end <= time:
            heappop(active)
        yield time, ordered[-active[0][2]].of if active else None


class _Cover:
    """Which of the spans, nested within each thread, is the innermost at a time."""

    def __init__(self, spans: Iterable[Event]) -> None:
        threads = defaultdict[tuple[Any, Any], list[Busy]](list)
        for span in spans:
            threads[span["pid"], span["tid"]].append(busy(span, span["name"]))
        self._changes = {thread: [*changes(own)] for thread, own in threads.items()}

    def at(self, pid: Any, tid: Any, time: float) -> str:
        """Its name; empty if there is none."""
        own = self._changes.get((pid, tid), [])
        at = bisect_right(own, time, key=lambda change: change[0])
        return own[at - 1][1] or "" if at else ""
