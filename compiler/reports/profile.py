"""The table of profiled steps beside the prediction, by plan line."""

from collections.abc import Iterator, Sequence

from ..analysis.time.profile import ELSEWHERE, KINDS, Line, Profile
from ..analysis.time.report import Report
from ..config.units import counted
from .summary import table as aligned
from .time import seconds

LEAST = 0.001
"""The least share of a step that a row has."""


def table(profile: Profile, lines: Sequence[Line], predicted: Report | None) -> str:
    """Seconds of each line, for people; `predicted` where it is of the device that the steps ran on."""
    rows = [heading(predicted is not None), *_rows(profile, lines, predicted is not None)]
    return "\n".join([*summary(profile, predicted), "", *aligned(rows, "lr")])


def summary(profile: Profile, predicted: Report | None) -> Iterator[str]:
    """Seconds of a step, beside the prediction."""
    of = f"{counted(profile.steps, 'step')} of {counted(len(profile.ranks), 'rank')}"
    yield f"{of} on {profile.device}: {seconds(profile.seconds)} a step"
    if it := predicted:
        yield f"predicted on {it.on.name}: {seconds(it.step.seconds)}, within {it.on.error:.0%}"


def heading(beside: bool) -> list[str]:
    """The names of the columns of `cells`."""
    return ["", *(name for kind in KINDS for name in ((kind, "predicted") if beside else (kind,)))]


def _rows(profile: Profile, lines: Sequence[Line], beside: bool) -> Iterator[list[str]]:
    """A row for each line, and one for all."""
    for line in lines:
        if line.name == ELSEWHERE or max(line.took, sum(line.predicted.values())) >= LEAST * profile.seconds:
            yield [line.name, *cells(line, beside)]
    total = Line(
        "in all",
        {kind: sum(line.measured[kind] for line in lines) for kind in KINDS},
        {kind: sum(line.predicted.get(kind, 0.0) for line in lines) for kind in KINDS},
    )
    yield [total.name, *cells(total, beside)]


def cells(line: Line, beside: bool) -> Iterator[str]:
    """The seconds of a line, kind by kind, as measured and, `beside` them, as predicted."""
    for kind in KINDS:
        yield seconds(line.measured[kind])
        if beside:
            yield seconds(line.predicted.get(kind, 0.0))
