"""The numbers of a run's log over its steps: a table and charts for the terminal, and a page with a
picture for each.

Non-goals: loads of experts (`expert_load`).
"""

import json
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from math import ceil, isfinite, nan
from statistics import fmean, median
from typing import Any

from attrs import frozen

from ...compiler.reports.summary import table
from ...compiler.syntax.package_data import fill_template
from ..drawing import Canvas, styles, ticks

ROWS, MARGIN = 5, 12
"""Lines of a chart, and columns left of it."""

DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))
"""The bits of a braille character by column, its four dots from the bottom (Unicode 15, section
21.1).
"""


@frozen
class Measure:
    """A number of log.jsonl, its name for people, and how it is written."""

    key: str
    name: str
    form: str

    def __call__(self, value: float) -> str:
        return format(value, self.form)


LOSS, VALIDATION = Measure("loss", "loss", ".4f"), Measure("validation", "validation loss", ".4f")
NORM, ROUTER_LOSS = (
    Measure("norm", "gradient norm", ".3g"),
    Measure("router_loss", "router loss", ".4f"),
)
SPEEDS = (
    Measure("tokens_per_s_gpu", "tokens/s/GPU", ",.0f"),
    Measure("tokens_per_s_process", "tokens/s/process", ",.0f"),
)
"""The speed of a run on GPUs, and of one on CPUs; of each run there is one."""

MEASURES = (LOSS, VALIDATION, NORM, ROUTER_LOSS, *SPEEDS, Measure("mfu", "MFU", ".1%"))
"""The measures that have charts, in order; a number that no run has gets no chart."""

Points = Sequence[tuple[int, float]]
"""Steps, and the number at each."""


@frozen
class Run:
    """A run's records by step, in order; the last records of a step that was repeated."""

    name: str
    records: tuple[dict[str, Any], ...]

    def points(self, measure: Measure) -> Points:
        """The logged steps that have this number."""
        points: list[tuple[int, float]] = []
        for record in self.records:
            if isfinite(record.get(measure.key, nan)):
                points.append((record["step"], record[measure.key]))
        return points

    def values(self, measure: Measure) -> list[float]:
        """The numbers alone, in the order of their steps."""
        return [value for _, value in self.points(measure)]

    @property
    def skip_count(self) -> int:
        """How many steps have updated nothing."""
        return sum(bool(record.get("skipped")) for record in self.records)


def read(name: str, log: str) -> Run | None:
    """The run of a log of JSON lines; None where no line has a loss.

    ValueError or KeyError where it is no log.
    """
    records: dict[int, dict[str, Any]] = {}
    for line in log.splitlines():
        record = json.loads(line)
        step = record["step"]
        records[step] = records.get(step, {}) | record
    run = Run(name, tuple(records[step] for step in sorted(records)))
    if not run.points(LOSS):
        return None
    return run


def text(runs: Sequence[Run], columns: int) -> str:
    """The table, and for each number a chart of each run, which have one scale."""
    return "\n\n".join(("\n".join(summary(runs)), *charts(runs, columns)))


def summary(runs: Sequence[Run]) -> Iterator[str]:
    """A table with a row for each run."""
    return table([head(runs), *map(row, runs)], "lr")


def head(runs: Sequence[Run]) -> tuple[str, ...]:
    """The names of the table's columns; the column of speed names the units of the runs."""
    units: list[str] = []
    for speed in SPEEDS:
        if any(run.points(speed) for run in runs):
            units.append(speed.name)
    return (
        "run",
        "steps",
        "loss",
        "least",
        "validation",
        " or ".join(units) or SPEEDS[0].name,
        "skipped",
    )


def row(run: Run) -> tuple[str, ...]:
    """The last loss, the least, the last validation, the median speed."""
    losses = run.values(LOSS)
    validations = run.values(VALIDATION)
    validation = VALIDATION(validations[-1]) if validations else ""
    speed = ""
    for measure in SPEEDS:
        if speeds := run.values(measure):
            speed += measure(median(speeds))
    steps = f"{run.points(LOSS)[0][0]:,} to {run.records[-1]['step']:,}"
    return (
        run.name,
        steps,
        LOSS(losses[-1]),
        LOSS(min(losses)),
        validation,
        speed,
        str(run.skip_count or ""),
    )


def charts(runs: Sequence[Run], columns: int) -> Iterator[str]:
    """A chart for each number and run."""
    first, last = _step_range(runs)
    width = max(columns - MARGIN, 10)
    for measure in MEASURES:
        lines = [run.points(measure) for run in runs]
        values = [value for _, value in chain.from_iterable(lines)]
        for run, points in zip(runs, lines, strict=True):
            if not points:
                continue
            head = measure.name
            if len(runs) > 1:
                head = f"{measure.name} of {run.name}"
            chart = _chart(points, (first, last), (min(values), max(values)), width)
            labelled = _label_chart(chart, measure, min(values), max(values))
            yield "\n".join((head, *labelled, _step_axis(first, last, width)))


def _step_range(runs: Sequence[Run]) -> tuple[int, int]:
    """The first and the last logged step of all runs."""
    first = min(run.records[0]["step"] for run in runs)
    last = max(run.records[-1]["step"] for run in runs)
    return first, last


def _label_chart(chart: Sequence[str], measure: Measure, low: float, high: float) -> Iterator[str]:
    """The lines of a chart with the highest and the lowest number left of them."""
    labels = {0: measure(high), len(chart) - 1: measure(low)}
    for number, line in enumerate(chart):
        edge = "┤" if number in labels else "│"
        yield f"{labels.get(number, ''):>{MARGIN - 3}} {edge}{line}".rstrip()


def _step_axis(first: int, last: int, width: int) -> str:
    """The line below a chart: its first and its last step."""
    begin, end = f"step {first:,}", f"{last:,}"
    return f"{'':>{MARGIN - 1}}{begin}{end:>{max(width - len(begin), len(end) + 1)}}"


def _chart(
    points: Points, steps: tuple[int, int], values: tuple[float, float], columns: int
) -> list[str]:
    """Lines of braille: in each column of dots the mean of its steps, joined to the next."""
    wide, high = 2 * columns, 4 * ROWS
    cells = [[0] * columns for _ in range(ROWS)]
    scale = (high - 1) / ((values[1] - values[0]) or 1)
    dots = [(x, round((value - values[0]) * scale)) for x, value in bin_points(points, steps, wide)]
    joined = dots[:1]
    for begin, end in pairwise(dots):
        joined.extend(_line_dots(begin, end))
    for x, y in joined:
        cells[ROWS - 1 - y // 4][x // 2] |= DOTS[x % 2][y % 4]
    return ["".join(map(_braille, line)) for line in cells]


def _braille(cell: int) -> str:
    """The character that has the dots of a cell; a blank for none."""
    return chr(0x2800 + cell) if cell else " "


def _line_dots(begin: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The dots of a line from `begin`, which is not among them, to `end`, which is."""
    (x, y), (to_x, to_y) = begin, end
    count = max(to_x - x, abs(to_y - y))
    for dot in range(1, count + 1):
        yield x + round((to_x - x) * dot / count), y + round((to_y - y) * dot / count)


def bin_points(points: Points, steps: tuple[int, int], count: int) -> Iterator[tuple[int, float]]:
    """The mean of the numbers in each of `count` equal parts of the steps; a part without
    numbers has none.
    """
    first, last = steps
    values_by_bin: dict[int, list[float]] = {}
    for step, value in points:
        number = (step - first) * (count - 1) // max(last - first, 1)
        values_by_bin.setdefault(number, []).append(value)
    return ((number, fmean(values_by_bin[number])) for number in sorted(values_by_bin))


MARK = "Written by scalec log"
"""A mark in the opening lines of every page."""

WIDTH, HEIGHT, LEFT, RIGHT, TOP = 900, 190, 76, 20, 14
"""Pixels of a picture, its plot's height, and the room around it."""


def page(runs: Sequence[Run]) -> str:
    """The text of the file, which needs nothing else."""
    steps = _step_range(runs)
    pictures: list[tuple[str, str]] = []
    for measure in MEASURES:
        if _has_line(measure, runs):
            pictures.append((measure.name, _picture(measure, runs, steps)))
    return fill_template(
        "log.html.j2",
        escaped=True,
        mark=MARK,
        title=" and ".join(run.name for run in runs),
        styles=styles({}),
        head=head(runs),
        rows=[row(run) for run in runs],
        pictures=pictures,
    )


def _has_line(measure: Measure, runs: Sequence[Run]) -> bool:
    """Whether a picture shows more than the table does: the loss, and numbers of several steps."""
    return measure is LOSS or any(len(run.points(measure)) > 1 for run in runs)


def _picture(measure: Measure, runs: Sequence[Run], steps: tuple[int, int]) -> str:
    """The lines of all runs, over a grid of round numbers."""
    lines = [[*bin_points(run.points(measure), steps, WIDTH)] for run in runs]
    values = [value for _, value in chain.from_iterable(lines)]
    low, high = min(values), max(values)
    canvas, foot, span = Canvas(WIDTH), TOP + HEIGHT, (high - low) or 1
    wide = WIDTH - LEFT - RIGHT

    def y(value: float) -> float:
        return foot - (value - low) / span * HEIGHT

    for tick in _within(low, high):
        canvas.line(LEFT, y(tick), WIDTH - RIGHT, y(tick))
        canvas.words(LEFT - 6, y(tick) + 4, measure(tick), "end muted")
    canvas.words(0, foot + 16, "step", "muted")
    for step in _within(*steps):
        x = LEFT + (step - steps[0]) / max(steps[1] - steps[0], 1) * wide
        canvas.words(x, foot + 16, f"{step:,.0f}", "mid muted")
    for series, line in enumerate(lines):
        places = [(LEFT + x / (WIDTH - 1) * wide, y(value)) for x, value in line]
        if len(places) > 1:
            canvas.path(places, f"trace l{series}")
        elif places:
            canvas.dot(*places[0], 2, f"s{series}")
    return canvas.svg(f"{measure.name} over steps {steps[0]:,} to {steps[1]:,}")


def _within(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`; `low` alone where the two are equal."""
    if high <= low:
        return [low]
    _, *later = ticks(high - low)
    if not later:
        return [low]
    step = later[0]
    least = ceil(low / step)
    multiples = range(least, least + len(later) + 1)
    return [step * multiple for multiple in multiples if step * multiple <= high]
