"""Adds plan lines to a profiler's trace where torch does not know them: in backward and on the GPU.

torch draws an arrow (category `fwdbwd`) from each op of forward to the node of backward that the op
made, and gives kernels the id of the op that started them.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import groupby
from typing import Any, NamedTuple

Event = dict[str, Any]
"""An event of the Chrome trace format: times in µs, `ph` X for events with a duration `dur`."""

_NODE = "autograd::engine::evaluate_function: "
# this node has no op of forward: it belongs to the line of the node that feeds it
_ACCUMULATES = f"{_NODE}torch::autograd::AccumulateGrad"
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}


def add_lines(trace: dict[str, Any], lines: Mapping[str, str]) -> None:
    """Adds to the `args` of ops and kernels of a trace the `line` that they belong to.

    `lines` has the names of spans in the trace, each with the line to add.  Consecutive nodes of
    backward that belong to one line become a span too, `backward of` the line.
    """
    events: list[Event] = trace["traceEvents"]
    spans = list[Event]()
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"] in lines:
            spans.append(event)
    backward_spans = list(_backward(events, _Cover(spans)))
    cover = _Cover([*spans, *backward_spans])
    line_of_op: dict[int, str] = {}
    for event in events:
        if event.get("cat") != "cpu_op":
            continue
        if span := cover.at(event["pid"], event["tid"], event["ts"]):
            line = lines[span.removeprefix("backward of ")]
            event["args"]["line"] = line
            line_of_op[event["args"]["External id"]] = line
    for event in events:
        if event.get("cat") in ON_GPU:
            line = line_of_op.get(event["args"].get("External id"))
            if line:
                event["args"]["line"] = line
    events += backward_spans


def _backward(events: Iterable[Event], forward: "_Cover") -> Iterator[Event]:
    """A span for each run of nodes, on one thread, that belong to one line."""
    starts, arrows, nodes = _arrows_and_nodes(events)
    nodes.sort(key=lambda node: (f"{node['pid']} {node['tid']}", node["ts"], -node["dur"]))
    for thread, nodes_of_thread in groupby(nodes, key=lambda node: (node["pid"], node["tid"])):
        ends = list[tuple[float, Any]]()
        for arrow in arrows:
            if arrow["id"] in starts and (arrow["pid"], arrow["tid"]) == thread:
                ends.append((arrow["ts"], arrow["id"]))
        ends.sort()
        with_lines = _with_lines(nodes_of_thread, ends, starts, forward)
        for line, run in groupby(with_lines, key=lambda line_and_node: line_and_node[0]):
            if line:
                yield _span_of_run(line, [node for _, node in run])


def _arrows_and_nodes(
    events: Iterable[Event],
) -> tuple[dict[Any, Event], list[Event], list[Event]]:
    """The starts of arrows by id, the ends of arrows, and the nodes of backward."""
    starts, ends, nodes = dict[Any, Event](), list[Event](), list[Event]()
    for event in events:
        if event.get("cat") == "fwdbwd" and event["ph"] == "s":
            starts[event["id"]] = event
        elif event.get("cat") == "fwdbwd" and event["ph"] == "f":
            ends.append(event)
        elif event.get("cat") == "cpu_op" and event["name"].startswith(_NODE):
            nodes.append(event)
    return starts, ends, nodes


def _with_lines(
    nodes: Iterable[Event],
    ends: Sequence[tuple[float, Any]],
    starts: Mapping[Any, Event],
    forward: "_Cover",
) -> list[tuple[str, Event]]:
    """The nodes of a thread, each with its line or "".

    `ends` are the times and the ids of the arrows that end in this thread, sorted.
    """
    with_lines = list[tuple[str, Event]]()
    for node in nodes:
        last = bisect_right(ends, (_end(node), len(starts) + 1)) - 1
        line = ""
        if last >= 0 and ends[last][0] >= node["ts"]:
            start = starts[ends[last][1]]
            line = forward.at(start["pid"], start["tid"], start["ts"])
        elif with_lines and node["name"] == _ACCUMULATES:
            line, _ = with_lines[-1]
        with_lines.append((line, node))
    return with_lines


def _span_of_run(line: str, nodes: Sequence[Event]) -> Event:
    """The span of consecutive nodes of backward that belong to one line."""
    first, last = nodes[0], nodes[-1]
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": f"backward of {line}",
        "pid": first["pid"],
        "tid": first["tid"],
        "ts": first["ts"],
        "dur": _end(last) - first["ts"],
        "args": {},
    }


def _end(event: Event) -> float:
    return event["ts"] + event["dur"]


class Busy(NamedTuple):
    """A stretch of time, in µs.

    Where several overlap, the one of least `order` counts; where these are several, the innermost:
    the last to start, then the first to end, then the last listed.
    """

    order: int
    start: float
    end: float
    value: Any


def busy(event: Event, value: Any, order: int = 0) -> Busy:
    """The stretch of an event, with a value."""
    return Busy(order, event["ts"], _end(event), value)


def changes(stretches: Iterable[Busy]) -> Iterator[tuple[float, Any]]:
    """The times when another stretch begins to count, with its value; None where none counts."""
    ordered = sorted(stretches, key=lambda stretch: (stretch.start, -stretch.end))
    times = set[float]()
    for stretch in ordered:
        times.update((stretch.start, stretch.end))
    active, following = list[tuple[int, float, int]](), 0
    for time in sorted(times):
        while following < len(ordered) and ordered[following].start <= time:
            stretch = ordered[following]
            heappush(active, (stretch.order, -stretch.start, -following))
            following += 1
        while active and ordered[-active[0][2]].end <= time:
            heappop(active)
        yield time, ordered[-active[0][2]].value if active else None


class _Cover:
    """Finds the innermost span at a time; spans are nested within each thread."""

    def __init__(self, spans: Iterable[Event]) -> None:
        threads = defaultdict[tuple[Any, Any], list[Busy]](list)
        for span in spans:
            threads[span["pid"], span["tid"]].append(busy(span, span["name"]))
        self._changes = {thread: [*changes(stretches)] for thread, stretches in threads.items()}

    def at(self, pid: Any, tid: Any, time: float) -> str:
        """The name of the innermost span of a thread at this time; "" if there is none."""
        changes_of_thread = self._changes.get((pid, tid), [])
        following = bisect_right(changes_of_thread, time, key=lambda change: change[0])
        if not following:
            return ""
        _, name = changes_of_thread[following - 1]
        return name or ""
