"""Steps that a run has profiled, by plan line, beside the prediction; figures of hardware that would explain them.

Non-goals: how a trace is summed, which the run does as it writes it.
"""

import json
from collections.abc import Mapping, Sequence
from math import exp, log
from pathlib import Path
from typing import Any, cast

from attrs import evolve, frozen

from ...ir import Program, walk, walk_regions
from ..hardware import Hardware
from .clocks import BUBBLE, HOST, StepTime
from .pipeline import step_time
from .prices import EXPOSED

KINDS = ("compute", "exposed", "idle")
"""A rank computes, waits for communication, or does nothing."""

ELSEWHERE = "elsewhere"
"""All that is on no line of the plan's model: the update, norms, the loop."""

Seconds = Mapping[str, float]
"""Seconds of a step by kind of `KINDS`."""


@frozen
class Profile:
    """Steps of a run.

    device  that it ran on, `cuda` or `cpu`
    steps   that were profiled
    ranks   whose seconds are averaged
    lines   seconds by plan line
    """

    device: str
    steps: int
    ranks: tuple[int, ...]
    lines: Mapping[str, Seconds]

    @property
    def seconds(self) -> float:
        """The seconds of a step."""
        return sum(sum(line.values()) for line in self.lines.values())


@frozen
class Line:
    """The seconds of a plan line, as measured and as predicted; without a prediction none are."""

    name: str
    measured: Seconds
    predicted: Seconds

    @property
    def took(self) -> float:
        """All that was measured."""
        return sum(self.measured.values())

    @property
    def excess(self) -> float:
        """The seconds beyond the prediction."""
        return self.took - sum(self.predicted.values())


def read_profile(folder: Path, ranks: Sequence[int] = ()) -> Profile | None:
    """The profile in a folder that SCALEC_PROFILE named, of those of `ranks` that are in it; of all, if none is.

    None where no rank has written any.  ValueError or KeyError where a file is not as a run writes it.
    """
    files = {int(path.stem[4:9]): path for path in sorted(folder.glob("rank?????-lines.json"))}
    found = {rank: json.loads(files[rank].read_text(encoding="utf-8")) for rank in files.keys() & {*ranks} or files}
    if not found:
        return None
    first, names = next(iter(found.values())), dict.fromkeys(name for it in found.values() for name in it["lines"])
    lines = {name: _mean([it["lines"].get(name, {}) for it in found.values()]) for name in names}
    return Profile(first["device"], first["steps"], tuple(sorted(found)), lines)


def ranks_at(program: Program, place: int | None) -> list[int]:
    """The ranks of a mesh at a place along the pipeline's axis, which is that of a prediction."""
    if place is None or program.pipeline is None:
        return []
    names = [axis.name for axis in program.axes]
    at = names.index(program.pipeline.axis)
    inner, size = program.degree(tuple(names[at + 1 :])), program.axes[at].size
    return [rank for rank in range(program.degree(tuple(names))) if rank // inner % size == place]


def strangers(profile: Profile, program: Program, time: StepTime) -> list[str]:
    """The lines of a profile that neither are in this program nor take any of its time."""
    body = program.region.body
    known = {str(stmt.span) for stmt in (*walk(body), *walk_regions(body))} | {line for _, line in time.spent}
    return [name for name in profile.lines if name and not _of_program(name) and name not in known]


def beside(profile: Profile, time: StepTime | None) -> list[Line]:
    """The lines of a plan's model, first those that exceed the prediction most, and `ELSEWHERE`."""
    predicted = dict[str, dict[str, float]]()
    for (kind, line), seconds in time.spent.items() if time else ():
        own = predicted.setdefault(line, dict.fromkeys(KINDS, 0.0))
        own[_kind(kind)] += seconds
    inside = [name for name in profile.lines if name and not _of_program(name)]
    lines = [Line(name, profile.lines[name], predicted.get(name, {})) for name in inside]
    rest = [seconds for name, seconds in profile.lines.items() if name not in inside]
    unmeasured = [seconds for name, seconds in predicted.items() if name not in inside]
    lines.sort(key=lambda line: -line.excess)
    return [*lines, Line(ELSEWHERE, _sum(rest), _sum(unmeasured) if time else {})]


def _kind(kind: str) -> str:
    """A rank of a pipeline waits for others' messages."""
    return "exposed" if kind.startswith((EXPOSED, BUBBLE)) else "idle" if kind == HOST else "compute"


def _of_program(name: str) -> bool:
    """Whether a line is one of the program, which no line of the plan asked for."""
    return name.startswith("train.py:")


def _sum(each: Sequence[Seconds]) -> dict[str, float]:
    return {kind: sum(seconds.get(kind, 0.0) for seconds in each) for kind in KINDS}


def _mean(each: Sequence[Seconds]) -> dict[str, float]:
    return {kind: seconds / len(each) for kind, seconds in _sum(each).items()}


RATES = {"held", "attention", "streamed", "link", "network"}
"""The figures that are larger where things take less time."""

LEAST, SHARE = 0.05, 0.01
"""The change of a figure, and the part of the step that it makes up, from which on it is named."""

ROUNDS, WEIGHINGS = 4, 12
"""How often the search follows the slopes of predictions, and how often it weighs the differences that these leave."""

NEAR, PRIOR = 0.001, 0.01
"""The part of a step below which differences count by their squares, above by themselves; what a change costs, in
steps by squares of logarithms, so that a figure which explains hardly anything stays."""


@frozen
class Figure:
    """Something that takes time, and where a file of hardware says how much.

    fields  of `Hardware`, in a file's words too
    table   of `Measured`, whose rows win
    nodes   whether the rows are those of groups on several nodes; None where that makes no difference
    """

    of: str
    place: str
    fields: Mapping[str, str]
    table: str = ""
    nodes: bool | None = None


FIGURES = (
    Figure("products", "gpu", {"held": "held"}, "products"),
    Figure("attention", "gpu", {"attention": "attention"}, "attention"),
    Figure("memory-bound ops", "gpu", {"streamed": "streamed"}, "moved"),
    Figure("shortest kernels", "gpu", {"kernel": "kernel"}),
    Figure("links in a node", "link: node", {"link": "bandwidth", "link_latency": "latency"}, "collectives", False),
    Figure(
        *("links between nodes", "link: adapters", {"network": "bandwidth", "network_latency": "latency"}),
        *("collectives", True),
    ),
    Figure("issuing an op", "host", {"op": "op"}),
    Figure("issuing a collective", "host", {"collective": "collective"}),
)


@frozen
class Fit:
    """Hardware on which the prediction is nearest to a profile.

    changes  by how many times the seconds of each figure are longer, of those that make a difference
    lines    of the profile, beside the prediction on this hardware
    """

    on: Hardware
    changes: Mapping[str, float]
    lines: tuple[Line, ...]


def fit(program: Program, on: Hardware, profile: Profile) -> Fit:
    """The fit to a profile by its lines' seconds of each kind: the least sum of differences, with the least changes.

    A line that differs by itself moves no figure, as differences count by themselves and not by their squares.
    """
    import numpy as np

    numpy: Any = np
    step, own = step_time(program, on).seconds, numpy.zeros(len(FIGURES))

    def differs(logs: Any) -> Any:
        lines = sorted(beside(profile, step_time(program, _changed(on, logs))), key=lambda line: line.name)
        excess = [line.measured.get(kind, 0.0) - line.predicted.get(kind, 0.0) for line in lines for kind in KINDS]
        return numpy.array(excess) / step

    def slopes(logs: Any, at: Any) -> Any:
        return numpy.stack([(differs(logs + LEAST * unit) - at) / LEAST for unit in numpy.eye(len(FIGURES))], 1)

    for _ in range(ROUNDS):
        at = differs(own)
        slope, moved = slopes(own, at), 0 * own
        for _ in range(WEIGHINGS):
            weighed = slope.T / numpy.maximum(abs(at + slope @ moved), NEAR)
            moved = numpy.linalg.solve(weighed @ slope + PRIOR * numpy.eye(len(FIGURES)), -weighed @ at - PRIOR * own)
        own = own + numpy.clip(moved, -log(2), log(2))
    shares = abs(slopes(own, differs(own)) * own).sum(0)
    named = numpy.where((abs(own) > LEAST) & (shares > SHARE), own, 0.0)
    fitted = _changed(on, named)
    changes = {it.of: exp(each) for it, each in zip(FIGURES, named, strict=True) if each}
    return Fit(fitted, changes, tuple(beside(profile, step_time(program, fitted))))


def _changed(on: Hardware, logs: Any) -> Hardware:
    for figure, each in zip(FIGURES, logs, strict=True):
        if each:
            on = slower(on, figure, exp(each))
    return on


def slower(on: Hardware, figure: Figure, times: float) -> Hardware:
    """The hardware where all that a figure is of takes a multiple of its time."""
    changed = {name: _scaled(getattr(on, name), 1 / times if name in RATES else times) for name in figure.fields}
    if figure.table:
        rows = tuple(_row(it, figure, times) for it in getattr(on.measured, figure.table))
        changed["measured"] = evolve(on.measured, **{figure.table: rows})
    return evolve(on, **changed)


def _scaled(figure: Any, times: float) -> Any:
    """A number, or one for each element type."""
    if isinstance(figure, Mapping):
        return {dtype: each * times for dtype, each in cast(Mapping[str, float], figure).items()}
    return figure * times


def _row(it: Any, figure: Figure, times: float) -> Any:
    if figure.nodes is not None and figure.nodes != (it.nodes > 1):
        return it
    if figure.table == "attention":
        return it._replace(forward=it.forward / times, backward=it.backward / times)
    return it._replace(seconds=it.seconds * times)
