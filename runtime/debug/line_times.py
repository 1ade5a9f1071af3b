"""A profiler's trace summed by plan line: the seconds of a step that compute, wait for
communication, or pass idle.

On a GPU a moment counts to the kernel that runs.  Communication is exposed where no other kernel
runs, and a gap counts to the kernel after it, for which the GPU waits.  On a CPU a moment counts to
the line that the step's thread is at: to communication where it hands a collective over or waits
for one, and in no op it is idle, that is Python's.
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
"""All that no line of the model asked for, as `scalec explain time --against` names it, and
lines of the program.
"""

_STEP = re.compile(r"step \d+")
_SENDS = ("c10d::", "_c10d_functional::")
_LINE = re.compile(r"(?:backward of )?(\S+:\d+)  ")

Times = dict[str, dict[str, float]]
"""Seconds of a step by line, "" for what belongs to none, and kind."""


def line_times(trace: Mapping[str, Any]) -> dict[str, Any]:
    """The sums of a trace with plan lines (`trace.add_lines`), each for one step on average."""
    events: list[Event] = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = [
        event
        for event in events
        if event.get("cat") == "user_annotation" and _STEP.fullmatch(event["name"])
    ]
    kernels = [event for event in events if event.get("cat") in ON_GPU]
    times: Times = defaultdict(lambda: dict.fromkeys((COMPUTE, EXPOSED, IDLE), 0.0))
    for kind, line, time in _on_gpu(kernels) if kernels else _on_cpu(events, steps):
        times[line][kind] += time / 1e6 / len(steps)
    seconds = sum(sum(each.values()) for each in times.values())
    return {
        "device": "cuda" if kernels else "cpu",
        "steps": len(steps),
        "seconds": seconds,
        "lines": dict(times),
    }


def longest(measured: Mapping[str, Any], plan_json: Path) -> str:
    """The lines that take longest beyond what the `plan.json` of the program predicts; "" where
    it predicts nothing.
    """
    try:
        said: list[dict[str, Any]] = json.loads(plan_json.read_text(encoding="utf-8"))["time"][
            "lines"
        ]
    except (OSError, ValueError, KeyError):
        return ""
    inside = {line for line in measured["lines"] if line and not line.startswith(_PROGRAM)}
    took, predicted = defaultdict[str, float](float), defaultdict[str, float](float)
    for line, kinds in measured["lines"].items():
        took[line if line in inside else ELSEWHERE] += sum(kinds.values())
    for each in said:
        predicted[each["line"] if each["line"] in inside else ELSEWHERE] += each["seconds"]
    worst = sorted(took, key=lambda line: predicted[line] - took[line])[:NAMED]
    return ", ".join(
        f"{line} {took[line] * 1e3:.1f} ms in place of {predicted[line] * 1e3:.1f}"
        for line in worst
    )


_Moment = tuple[str, str, float]
"""Kind, line and µs of a stretch of a step."""


def _on_gpu(kernels: Iterable[Event]) -> Iterator[_Moment]:
    """From the first kernel to the end of the last."""
    stretches = list[Busy]()
    for event in kernels:
        sends = event["name"].startswith("nccl")
        stretches.append(
            busy(event, (EXPOSED if sends else COMPUTE, event["args"].get("line", "")), sends)
        )
    for (start, of), (end, after) in pairwise(changes(stretches)):
        kind, line = of or (IDLE, after[1])
        yield kind, line, end - start


def _on_cpu(events: Iterable[Event], steps: Sequence[Event]) -> Iterator[_Moment]:
    """From the begin to the end of each step."""
    threads = {(step["pid"], step["tid"]) for step in steps}
    own = [event for event in events if (event["pid"], event["tid"]) in threads]
    sends = [
        busy(event, EXPOSED)
        for event in own
        if event["name"] == WAIT or event["name"].startswith(_SENDS)
    ]
    ops = [busy(event, COMPUTE, 1) for event in own if event.get("cat") == "cpu_op"]
    lines = [busy(event, found[1]) for event in own if (found := _LINE.match(event["name"]))]
    during = [busy(step, True) for step in steps]
    for (within, kind, line), time in _together(during, [*sends, *ops], lines):
        if within:
            yield kind or IDLE, line or "", time


def _together(*each: Sequence[Busy]) -> Iterator[tuple[list[Any], float]]:
    """The values of several series as long as none of them changes."""
    ordered = [(time, at, of) for at, own in enumerate(each) for time, of in changes(own)]
    ordered.sort(key=lambda change: change[:2])
    values: list[Any] = [None] * len(each)
    for (start, at, of), (end, *_) in pairwise(ordered):
        values[at] = of
        if end > start:
            yield [*values], end - start
