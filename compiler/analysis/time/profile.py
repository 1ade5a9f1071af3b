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
    """The seconds of a plan line, as measured and as predicted (none without a prediction)."""

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
    """The profile in a folder that SCALEC_PROFILE named: of the ranks of `ranks` that are in it, or
    of all, if none is.

    None where no rank has written any.  ValueError or KeyError where a file is not as a run writes
    it.
    """
    files = {int(path.stem[4:9]): path for path in sorted(folder.glob("rank?????-lines.json"))}
    chosen_ranks = files.keys() & {*ranks} or files
    profiles = {rank: json.loads(files[rank].read_text(encoding="utf-8")) for rank in chosen_ranks}
    if not profiles:
        return None
    names: dict[str, None] = {}
    for profile in profiles.values():
        names |= dict.fromkeys(profile["lines"])
    lines: dict[str, Seconds] = {}
    for name in names:
        lines[name] = _mean([profile["lines"].get(name, {}) for profile in profiles.values()])
    first = next(iter(profiles.values()))
    return Profile(first["device"], first["steps"], tuple(sorted(profiles)), lines)


def ranks_at(program: Program, place: int | None) -> list[int]:
    """The ranks of a mesh at a place along the pipeline's axis, as a prediction names it."""
    if place is None or program.pipeline is None:
        return []
    names = [axis.name for axis in program.axes]
    number = names.index(program.pipeline.axis)
    inner, size = program.degree(tuple(names[number + 1 :])), program.axes[number].size
    return [rank for rank in range(program.degree(tuple(names))) if rank // inner % size == place]


def strangers(profile: Profile, program: Program, time: StepTime) -> list[str]:
    """The lines of a profile that neither are in this program nor take any of its time."""
    body = program.region.body
    known = {str(stmt.span) for stmt in (*walk(body), *walk_regions(body))}
    known.update(line for _, line in time.spent)
    return [name for name in profile.lines if name and not _of_program(name) and name not in known]


def beside(profile: Profile, time: StepTime | None) -> list[Line]:
    """The lines of a plan's model, by their excess over the prediction, and `ELSEWHERE`."""
    predicted = dict[str, dict[str, float]]()
    if time:
        for (kind, line), seconds in time.spent.items():
            line_seconds = predicted.setdefault(line, dict.fromkeys(KINDS, 0.0))
            line_seconds[_kind(kind)] += seconds
    lines, measured_elsewhere = list[Line](), list[Seconds]()
    for name, seconds in profile.lines.items():
        if name and not _of_program(name):
            lines.append(Line(name, seconds, predicted.pop(name, {})))
        else:
            measured_elsewhere.append(seconds)
    lines.sort(key=lambda line: -line.excess)
    predicted_elsewhere = _sum([*predicted.values()]) if time else {}
    return [*lines, Line(ELSEWHERE, _sum(measured_elsewhere), predicted_elsewhere)]


def _kind(kind: str) -> str:
    """The kind of `KINDS` for a kind of predicted time."""
    if kind.startswith((EXPOSED, BUBBLE)):
        return "exposed"  # in a bubble, a rank waits for others' messages
    if kind == HOST:
        return "idle"
    return "compute"


def _of_program(name: str) -> bool:
    """Whether a line is in the program's file, and no line of the plan asked for it."""
    return name.startswith("train.py:")


def _sum(lines: Sequence[Seconds]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for kind in KINDS:
        sums[kind] = sum(seconds.get(kind, 0.0) for seconds in lines)
    return sums


def _mean(lines: Sequence[Seconds]) -> dict[str, float]:
    return {kind: seconds / len(lines) for kind, seconds in _sum(lines).items()}
