"""Profiled steps beside the prediction, by plan line, and the figures of hardware that would
explain what differs.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from ..analysis.hardware import DATA_SHEETS, Hardware
from ..analysis.time.fit import FIGURES, Figure, Fit
from ..analysis.time.op_rows import OpRow
from ..analysis.time.profile import ELSEWHERE, KINDS, Line, Profile
from ..analysis.time.report import Report
from ..config.units import counted
from .summary import table as aligned
from .time import seconds

LEAST = 0.001
"""The least share of a step that a row has."""


def table(profile: Profile, lines: Sequence[Line], predicted: Report | None) -> str:
    """Seconds of each line, for people; `predicted` where it is of the device that the steps
    ran on.
    """
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
        if (
            line.name == ELSEWHERE
            or max(line.took, sum(line.predicted.values())) >= LEAST * profile.seconds
        ):
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


LINKS = "in brackets: seconds on links, also those beside computation"


EXACT = 5e-7
"""Seconds below which nothing differs."""


def fitted(profile: Profile, lines: Sequence[Line], of: Report, found: Fit) -> str:
    """The lines, those that differ most first, each with the ops that were predicted for it;
    then the figures.
    """
    rows = [[*heading(True), "differs"]]
    for line in sorted(lines, key=lambda line: -abs(line.excess)):
        rows.append([line.name, *cells(line, True), _signed(line.excess)])
        if abs(line.excess) >= LEAST * profile.seconds:
            least = LEAST * of.step.seconds
            rows += (
                _op(op) for op in of.ops if op.line == line.name and sum(op.taken.values()) >= least
            )
    return "\n".join(
        [
            *summary(profile, of),
            "",
            *aligned(rows, "lr"),
            LINKS,
            "",
            *_explained(lines, of.on, found),
        ]
    )


def _signed(time: float) -> str:
    return f"{'-' if time < 0 else '+'}{seconds(abs(time))}" if abs(time) >= EXACT else "0"


def _op(op: OpRow) -> list[str]:
    """An op in the columns of its line."""
    computes, sends = sum(op.computes.values()), sum(op.sends.values())
    links = f"({seconds(sends)})" if sends else ""
    return [
        f"  {op.kind} {op.name}, {op.where}",
        "",
        seconds(computes) if computes else "",
        "",
        links,
        "",
        "",
        "",
    ]


def _explained(lines: Sequence[Line], on: Hardware, found: Fit) -> Iterator[str]:
    """The figures that would explain the differences, and how much of them."""
    if not found.changes:
        yield "no figure of the hardware would explain what differs"
        return
    rows = [_change(it, on, found) for it in FIGURES if it.of in found.changes]
    given = on.source if on.source == DATA_SHEETS else "in the file"
    yield from aligned(
        [("slower or faster", "seconds", "figure", given, "would explain it"), *rows], "lrlrr"
    )
    before, after = (sum(abs(line.excess) for line in each) for each in (lines, found.lines))
    yield f"with that, lines differ by {seconds(after)} in all, in place of {seconds(before)}"


def _change(it: Figure, on: Hardware, found: Fit) -> tuple[str, ...]:
    """How much longer something takes, and the figure that says it; measured rows, where there
    are any.
    """
    times = found.changes[it.of]
    share = f"{times - 1:+.0%}"
    if it.table and getattr(on.measured, it.table):
        return (
            it.of,
            share,
            f"[[{it.table.removesuffix('s')}]] seconds",
            "as measured",
            f"{times:.3g} times that",
        )
    given, explains = (
        ", ".join(_figure(getattr(each, name)) for name in it.fields) for each in (on, found.on)
    )
    return it.of, share, f"[{it.place}] {', '.join(it.fields.values())}", given, explains


def _figure(value: Any) -> str:
    if isinstance(value, Mapping):
        each = cast(Mapping[str, float], value)
        return f"{{ {', '.join(f'{dtype} = {_figure(part)}' for dtype, part in each.items())} }}"
    return f"{value:.3g}"
