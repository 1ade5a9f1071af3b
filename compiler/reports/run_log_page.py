"""The page of `scalec log`: the table, and a picture for each number with all runs."""

from collections.abc import Sequence
from math import ceil

from ..syntax.package_data import filled
from .drawing import Canvas, styles, ticks
from .run_log import HEAD, MEASURES, Measure, Run, binned, row

MARK = "Written by scalec log"
"""A mark in the opening lines of every page."""

WIDTH, HEIGHT, LEFT, RIGHT, TOP = 900, 190, 76, 20, 14
"""Pixels of a picture, its plot's height, and the room around it."""


def page(runs: Sequence[Run]) -> str:
    """The text of the file, which needs nothing else."""
    steps = min(run.records[0]["step"] for run in runs), max(run.records[-1]["step"] for run in runs)
    pictures = [(it.name, _picture(it, runs, steps)) for it in MEASURES if any(run.points(it) for run in runs)]
    return filled(
        "log.html.j2",
        escaped=True,
        mark=MARK,
        title=" and ".join(run.name for run in runs),
        styles=styles({}),
        head=HEAD,
        rows=[row(run) for run in runs],
        pictures=pictures,
    )


def _picture(measure: Measure, runs: Sequence[Run], steps: tuple[int, int]) -> str:
    """The lines of all runs, over a grid of round numbers."""
    lines = [[*binned(run.points(measure), steps, WIDTH)] for run in runs]
    values = [value for line in lines for _, value in line]
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
        at = LEFT + (step - steps[0]) / max(steps[1] - steps[0], 1) * wide
        canvas.words(at, foot + 16, f"{step:,.0f}", "mid muted")
    for at, line in enumerate(lines):
        places = [(LEFT + x / (WIDTH - 1) * wide, y(value)) for x, value in line]
        if len(places) > 1:
            canvas.path(places, f"trace l{at}")
        elif places:
            canvas.dot(*places[0], 2, f"s{at}")
    return canvas.svg(f"{measure.name} over steps {steps[0]:,} to {steps[1]:,}")


def _within(low: float, high: float) -> list[float]:
    """Round numbers from one to another; the one where both are the same."""
    _, *rest = ticks(high - low) if high > low else (0.0,)
    if not rest:
        return [low]
    least = ceil(low / rest[0])
    return [rest[0] * at for at in range(least, least + len(rest) + 1) if rest[0] * at <= high]
