"""The report of `scalec calibrate --fit`: where prediction and profile differ, and which figures would explain it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from ..analysis.hardware import DATA_SHEETS, Hardware
from ..analysis.time.fit import FIGURES, Figure, Fit
from ..analysis.time.op_rows import OpRow
from ..analysis.time.profile import Line, Profile
from ..analysis.time.report import Report
from .profile import LEAST, cells, heading, summary
from .summary import table
from .time import seconds

LINKS = "in brackets: seconds on links, also those beside computation"


EXACT = 5e-7
"""Seconds below which nothing differs."""


def fitted(profile: Profile, lines: Sequence[Line], of: Report, found: Fit) -> str:
    """The lines, those that differ most first, each with the ops that were predicted for it; then the figures."""
    rows = [[*heading(True), "differs"]]
    for line in sorted(lines, key=lambda line: -abs(line.excess)):
        rows.append([line.name, *cells(line, True), _signed(line.excess)])
        if abs(line.excess) >= LEAST * profile.seconds:
            rows += (_op(op) for op in of.ops if op.line == line.name and _taken(op) >= LEAST * of.step.seconds)
    return "\n".join([*summary(profile, of), "", *table(rows, "lr"), LINKS, "", *_explained(lines, of.on, found)])


def _signed(time: float) -> str:
    return f"{'-' if time < 0 else '+'}{seconds(abs(time))}" if abs(time) >= EXACT else "0"


def _taken(op: OpRow) -> float:
    return sum(op.taken.values())


def _op(op: OpRow) -> list[str]:
    """An op in the columns of its line."""
    computes, sends = sum(op.computes.values()), sum(op.sends.values())
    links = f"({seconds(sends)})" if sends else ""
    return [f"  {op.kind} {op.name}, {op.where}", "", seconds(computes) if computes else "", "", links, "", "", ""]


def _explained(lines: Sequence[Line], on: Hardware, found: Fit) -> Iterator[str]:
    """The figures that would explain the differences, and how much of them."""
    if not found.changes:
        yield "no figure of the hardware would explain what differs"
        return
    rows = [_change(it, on, found) for it in FIGURES if it.of in found.changes]
    given = on.source if on.source == DATA_SHEETS else "in the file"
    yield from table([("slower or faster", "seconds", "figure", given, "would explain it"), *rows], "lrlrr")
    before, after = (sum(abs(line.excess) for line in each) for each in (lines, found.lines))
    yield f"with that, lines differ by {seconds(after)} in all, in place of {seconds(before)}"


def _change(it: Figure, on: Hardware, found: Fit) -> tuple[str, ...]:
    """How much longer something takes, and the figure that says it; measured rows, where there are any."""
    times = found.changes[it.of]
    share = f"{times - 1:+.0%}"
    if it.table and getattr(on.measured, it.table):
        return it.of, share, f"[[{it.table.removesuffix('s')}]] seconds", "as measured", f"{times:.3g} times that"
    given, explains = (", ".join(_figure(getattr(each, name)) for name in it.fields) for each in (on, found.on))
    return it.of, share, f"[{it.place}] {', '.join(it.fields.values())}", given, explains


def _figure(value: Any) -> str:
    if isinstance(value, Mapping):
        each = cast(Mapping[str, float], value)
        return f"{{ {', '.join(f'{dtype} = {_figure(part)}' for dtype, part in each.items())} }}"
    return f"{value:.3g}"
