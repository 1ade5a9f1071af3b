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
from ..config.units import count_words
from .summary import table as aligned
from .time import seconds

LEAST = 0.001
"""The least share of a step that a row has."""


def table(profile: Profile, lines: Sequence[Line], predicted: Report | None) -> str:
    """Seconds of each line, for people; `predicted` is None unless it is for the device that the
    steps ran on.
    """
    rows = [heading(predicted is not None), *_rows(profile, lines, predicted is not None)]
    return "\n".join([*summary(profile, predicted), "", *aligned(rows, "lr")])


def summary(profile: Profile, predicted: Report | None) -> Iterator[str]:
    """Seconds of a step, beside the prediction."""
    steps = f"{count_words(profile.steps, 'step')} of {count_words(len(profile.ranks), 'rank')}"
    yield f"{steps} on {profile.device}: {seconds(profile.seconds)} a step"
    if predicted:
        step, on = predicted.step, predicted.on
        yield f"predicted on {on.name}: {seconds(step.seconds)}, within {on.error:.0%}"


def heading(beside: bool) -> list[str]:
    """The names of the columns: none for the line, then the names for `cells`."""
    names = [""]
    for kind in KINDS:
        names.append(kind)
        if beside:
            names.append("predicted")
    return names


def _rows(profile: Profile, lines: Sequence[Line], beside: bool) -> Iterator[list[str]]:
    """A row for each line, and one for all."""
    least = LEAST * profile.seconds
    for line in lines:
        if line.name == ELSEWHERE or max(line.took, sum(line.predicted.values())) >= least:
            yield [line.name, *cells(line, beside)]
    measured, predicted = dict[str, float](), dict[str, float]()
    for kind in KINDS:
        measured[kind] = sum(line.measured[kind] for line in lines)
        predicted[kind] = sum(line.predicted.get(kind, 0.0) for line in lines)
    yield ["in all", *cells(Line("in all", measured, predicted), beside)]


def cells(line: Line, beside: bool) -> Iterator[str]:
    """The seconds of a line, kind by kind, as measured and, `beside` them, as predicted."""
    for kind in KINDS:
        yield seconds(line.measured[kind])
        if beside:
            yield seconds(line.predicted.get(kind, 0.0))


LINKS = "in brackets: seconds on links, also those beside computation"


EXACT = 5e-7
"""Seconds below which nothing differs."""


def explain_fit(profile: Profile, lines: Sequence[Line], report: Report, fit: Fit) -> str:
    """The lines, the largest difference first, each with the ops that were predicted for it;
    then the figures of the hardware that would explain the differences.
    """
    rows = [[*heading(True), "differs"]]
    least_of_op = LEAST * report.step.seconds
    for line in sorted(lines, key=lambda line: -abs(line.excess)):
        rows.append([line.name, *cells(line, True), _sign(line.excess)])
        if abs(line.excess) < LEAST * profile.seconds:
            continue
        for op in report.ops:
            if op.line == line.name and sum(op.all_seconds.values()) >= least_of_op:
                rows.append(_op(op))
    parts = [*summary(profile, report), "", *aligned(rows, "lr"), LINKS, ""]
    return "\n".join([*parts, *_fit_lines(lines, report.on, fit)])


def _sign(time: float) -> str:
    if abs(time) < EXACT:
        return "0"
    sign = "-" if time < 0 else "+"
    return f"{sign}{seconds(abs(time))}"


def _op(op: OpRow) -> list[str]:
    """An op in the columns of its line."""
    computes, sends = sum(op.computes.values()), sum(op.sends.values())
    computes_words = seconds(computes) if computes else ""
    links = f"({seconds(sends)})" if sends else ""
    return [f"  {op.kind} {op.name}, {op.where}", "", computes_words, "", links, "", "", ""]


def _fit_lines(lines: Sequence[Line], on: Hardware, fit: Fit) -> Iterator[str]:
    """The figures that would explain the differences, and how much of them."""
    if not fit.changes:
        yield "no figure of the hardware would explain what differs"
        return
    changes = [_change(figure, on, fit) for figure in FIGURES if figure.name in fit.changes]
    source = on.source if on.source == DATA_SHEETS else "in the file"
    head = ("slower or faster", "seconds", "figure", source, "would explain it")
    yield from aligned([head, *changes], "lrlrr")
    before = sum(abs(line.excess) for line in lines)
    after = sum(abs(line.excess) for line in fit.lines)
    yield f"with that, lines differ by {seconds(after)} in all, in place of {seconds(before)}"


def _change(figure: Figure, on: Hardware, fit: Fit) -> tuple[str, ...]:
    """How much longer something takes, and the figure that says it; measured rows, where there
    are any.
    """
    times = fit.changes[figure.name]
    share = f"{times - 1:+.0%}"
    if figure.table and getattr(on.measured, figure.table):
        rows = f"[[{figure.table.removesuffix('s')}]] seconds"
        return figure.name, share, rows, "as measured", f"{times:.3g} times that"
    fields = f"[{figure.place}] {', '.join(figure.fields.values())}"
    return figure.name, share, fields, _figures(figure, on), _figures(figure, fit.on)


def _figures(figure: Figure, hardware: Hardware) -> str:
    """The values of a figure's fields in a description of hardware."""
    return ", ".join(_figure(getattr(hardware, name)) for name in figure.fields)


def _figure(value: Any) -> str:
    if isinstance(value, Mapping):
        values = cast(Mapping[str, float], value)
        parts = ", ".join(f"{dtype} = {_figure(part)}" for dtype, part in values.items())
        return f"{{ {parts} }}"
    return f"{value:.3g}"
