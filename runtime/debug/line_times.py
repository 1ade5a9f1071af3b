"""A profiler's trace summed by plan line: the seconds of a step that compute, wait for
communication, or pass idle.

On a GPU a moment counts to the kernel that runs.  Communication is exposed where no other kernel
runs.  A gap counts to the kernel after it: the GPU waits for that one.  On a CPU a moment counts to
the line that the step's thread is at: to communication where the thread hands a collective over or
waits for one.  Outside of ops it is idle: Python runs.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from .trace import ON_GPU, Busy, Event, busy, changes

COMPUTE, EXPOSED, IDLE = "compute", "exposed", "idle"

WAIT = "wait"
"""The span in which a thread waits for a collective."""

NAMED = 3
"""The number of lines that a slow run names."""

ELSEWHERE, _PROGRAM = "elsewhere", "train.py:"
"""The name of time that no line of the model asked for, as `scalec explain time --against` has it;
and the beginning of the names of lines of the program.
"""

_STEP = re.compile(r"step \d+")
_SENDS = ("c10d::", "_c10d_functional::")
_LINE = re.compile(r"(?:backward of )?(\S+:\d+)  ")

Times = dict[str, dict[str, float]]
"""Seconds of a step, by line and kind; the line is "" for time that belongs to none."""


def line_times(trace: Mapping[str, Any]) -> dict[str, Any]:
    """The sums of a trace with plan lines (`trace.add_lines`), each for one step on average."""
    events = list[Event]()
    steps = list[Event]()
    kernels = list[Event]()
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        events.append(event)
        if event.get("cat") == "user_annotation" and _STEP.fullmatch(event["name"]):
            steps.append(event)
        if event.get("cat") in ON_GPU:
            kernels.append(event)
    moments = _on_gpu(kernels) if kernels else _on_cpu(events, steps)
    times: Times = defaultdict(lambda: dict.fromkeys((COMPUTE, EXPOSED, IDLE), 0.0))
    for kind, line, time in moments:
        times[line][kind] += time / 1e6 / len(steps)
    return {
        "device": "cuda" if kernels else "cpu",
        "steps": len(steps),
        "seconds": sum(sum(kinds.values()) for kinds in times.values()),
        "lines": dict(times),
    }


def longest(measured: Mapping[str, Any], plan_json: Path) -> str:
    """The lines that take longest beyond what the `plan.json` of the program predicts; "" where
    it predicts nothing.
    """
    try:
        plan = json.loads(plan_json.read_text(encoding="utf-8"))
        predictions: list[dict[str, Any]] = plan["time"]["lines"]
    except (OSError, ValueError, KeyError):
        return ""
    inside = {line for line in measured["lines"] if line and not line.startswith(_PROGRAM)}
    took, predicted = defaultdict[str, float](float), defaultdict[str, float](float)
    for line, kinds in measured["lines"].items():
        took[line if line in inside else ELSEWHERE] += sum(kinds.values())
    for prediction in predictions:
        line = prediction["line"]
        predicted[line if line in inside else ELSEWHERE] += prediction["seconds"]
    worst = sorted(took, key=lambda line: predicted[line] - took[line])[:NAMED]
    return ", ".join(
        f"{line} {took[line] * 1e3:.1f} ms in place of {predicted[line] * 1e3:.1f}"
        for line in worst
    )


_Moment = tuple[str, str, float]
"""Kind, line and µs of a stretch of a step."""


def _on_gpu(kernels: Iterable[Event]) -> Iterator[_Moment]:
    """The moments from the first kernel to the end of the last."""
    stretches = list[Busy]()
    for event in kernels:
        sends = event["name"].startswith("nccl")
        kind_and_line = (EXPOSED if sends else COMPUTE, event["args"].get("line", ""))
        stretches.append(busy(event, kind_and_line, sends))
    for (start, running), (end, following) in pairwise(changes(stretches)):
        # a gap counts to the line of the kernel after it
        kind, line = running or (IDLE, following[1])
        yield kind, line, end - start


def _on_cpu(events: Iterable[Event], steps: Sequence[Event]) -> Iterator[_Moment]:
    """The moments from the beginning to the end of each step."""
    threads = {(step["pid"], step["tid"]) for step in steps}
    sends, ops, lines = list[Busy](), list[Busy](), list[Busy]()
    for event in events:
        if (event["pid"], event["tid"]) not in threads:
            continue
        if event["name"] == WAIT or event["name"].startswith(_SENDS):
            sends.append(busy(event, EXPOSED))
        if event.get("cat") == "cpu_op":
            ops.append(busy(event, COMPUTE, 1))
        if match := _LINE.match(event["name"]):
            lines.append(busy(event, match[1]))
    in_steps = [busy(step, True) for step in steps]
    for (is_in_step, kind, line), time in _merge_series(in_steps, [*sends, *ops], lines):
        if is_in_step:
            yield kind or IDLE, line or "", time


def _merge_series(*all_stretches: Sequence[Busy]) -> Iterator[tuple[list[Any], float]]:
    """The values of several series of stretches, and the µs during which none of them changes."""
    ordered = list[tuple[float, int, Any]]()
    for series, stretches in enumerate(all_stretches):
        for time, value in changes(stretches):
            ordered.append((time, series, value))
    ordered.sort(key=lambda change: change[:2])
    values: list[Any] = [None] * len(all_stretches)
    for (start, series, value), (end, *_) in pairwise(ordered):
        values[series] = value
        if end > start:
            yield [*values], end - start
