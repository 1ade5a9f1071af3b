"""Steps that a run has profiled, by plan line, beside the prediction.

Non-goals: how a trace is summed, which the run does as it writes it.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import frozen

from ...ir import Program, walk, walk_regions
from .clocks import BUBBLE, HOST, StepTime
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
    """The profile in a folder that SCALEC_PROFILE named, of those of `ranks` that are in it; of
    all, if none is.

    None where no rank has written any.  ValueError or KeyError where a file is not as a run writes
    it.
    """
    files = {int(path.stem[4:9]): path for path in sorted(folder.glob("rank?????-lines.json"))}
    found = {
        rank: json.loads(files[rank].read_text(encoding="utf-8"))
        for rank in files.keys() & {*ranks} or files
    }
    if not found:
        return None
    first, names = (
        next(iter(found.values())),
        dict.fromkeys(name for it in found.values() for name in it["lines"]),
    )
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
    known = {str(stmt.span) for stmt in (*walk(body), *walk_regions(body))} | {
        line for _, line in time.spent
    }
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
    return (
        "exposed" if kind.startswith((EXPOSED, BUBBLE)) else "idle" if kind == HOST else "compute"
    )


def _of_program(name: str) -> bool:
    """Whether a line is one of the program, which no line of the plan asked for."""
    return name.startswith("train.py:")


def _sum(each: Sequence[Seconds]) -> dict[str, float]:
    return {kind: sum(seconds.get(kind, 0.0) for seconds in each) for kind in KINDS}


def _mean(each: Sequence[Seconds]) -> dict[str, float]:
    return {kind: seconds / len(each) for kind, seconds in _sum(each).items()}
