"""Pictures of a sweep: curves over one axis, a heat map over two."""

from collections.abc import Sequence
from itertools import pairwise
from math import log2

from ...reports.drawing import Canvas, ticks, wide
from .sweep import Point

MARK = "Drawn by scalec plan"

LEFT, TOP, PANEL, GAP, STEP, LINE = 90, 70, 180, 60, 96, 20
"""Pixels: left of the panels, above them, their height, between them, from one point to the next at least, a line."""

CELL, WIDE, HIGH = "; in a cell MFU, tokens/s/GPU, the mesh of the best plan", 150, 64

COLD, HOT, LEVELS = (247, 251, 255), (8, 81, 156), 20
"""The colours of no MFU and of the highest, and how many there are between them."""


def svg(points: Sequence[Point], title: str, source: str) -> str:
    """The text of the file."""
    axes = [*points[0].values]
    return _curves(points, axes[0], title, source) if len(axes) == 1 else _heat(points, axes, title, source)


def _canvas(width: float, title: str, source: str) -> Canvas:
    canvas = Canvas(max(width, 24 + max(wide(title), wide(source))))
    canvas.words(12, 20, title, "head")
    canvas.words(12, 38, source)
    return canvas


def _curves(points: Sequence[Point], axis: str, title: str, source: str) -> str:
    """Throughput and MFU, each in a panel, then the plans, then why throughput falls where it does."""
    xs, values = _places([it.values[axis] for it in points]), [_shown(it.values[axis]) for it in points]
    plans = [str(it.best.choice) if it.best else "nothing fits" for it in points]
    canvas = _canvas(max(xs[-1] + 60, LEFT + 20 + max(map(wide, plans))), title, source)
    bottom = TOP + 2 * PANEL + GAP
    _panel(canvas, TOP, xs, "tokens/s/GPU", [it.best.tokens if it.best else None for it in points], ",.0f")
    _panel(canvas, TOP + PANEL + GAP, xs, "MFU, %", [it.best.mfu * 100 if it.best else None for it in points], ".1f")
    canvas.words(12, bottom + 18, axis)
    y = bottom + GAP + 10
    for x, value, plan in zip(xs, values, plans, strict=True):
        canvas.words(x, bottom + 18, value, "mid")
        canvas.words(LEFT - 6, y, value, "end")
        canvas.words(LEFT + 6, y, plan)
        y += LINE
    for number, place in enumerate((place for place, it in enumerate(points) if it.cliff), 1):
        x = (xs[place] + xs[place - 1]) / 2
        canvas.line(x, TOP, x, bottom, "cap")
        canvas.words(x, TOP - 6, f"({number})", "mid alarm")
        canvas.words(12, y, f"({number}) at {values[place]}: {points[place].cliff}", "alarm")
        y += LINE
    return canvas.file(title, MARK)


def _places(values: Sequence[int | str]) -> list[float]:
    """Where points lie: numbers by their logarithms, words as far from each other."""
    numbers = [log2(it) for it in values if isinstance(it, int)]
    at = numbers if len(numbers) == len(values) else [*map(float, range(len(values)))]
    closest = min((b - a for a, b in pairwise(at)), default=1.0) or 1.0
    return [LEFT + 30 + (it - at[0]) / closest * STEP for it in at]


def _panel(
    canvas: Canvas, top: float, xs: Sequence[float], name: str, values: Sequence[float | None], form: str
) -> None:
    """A curve, its points labelled, over lines at round numbers."""
    high = 1.1 * max((it for it in values if it is not None), default=1.0)
    canvas.words(12, top - 10, name)
    for tick in ticks(high):
        y = top + PANEL * (1 - tick / high)
        canvas.line(LEFT, y, xs[-1] + 30, y)
        canvas.words(LEFT - 6, y + 4, f"{tick:,.10g}", "end muted")
    places = [(x, top + PANEL * (1 - it / high), it) for x, it in zip(xs, values, strict=True) if it is not None]
    if places:
        canvas.path([(x, y) for x, y, _ in places], "trace l0")
    for x, y, value in places:
        canvas.dot(x, y, 3, "s0")
        canvas.words(x, y - 8, format(value, form), "mid")


def _heat(points: Sequence[Point], axes: Sequence[str], title: str, source: str) -> str:
    rows, columns = ([*dict.fromkeys(it.values[axis] for it in points)] for axis in axes)
    most = max((it.best.mfu for it in points if it.best), default=1.0)
    foot, fills = TOP + HIGH * len(rows), {"light": "#ffffff"}
    canvas = _canvas(LEFT + WIDE * len(columns) + 20, title, f"{source}{CELL}")
    for it in points:
        x, y = LEFT + WIDE * columns.index(it.values[axes[1]]), TOP + HIGH * rows.index(it.values[axes[0]])
        level, said, style = 0, ["does not fit"], "blank"
        if best := it.best:
            level, said = round(LEVELS * best.mfu / most), [f"{best.mfu:.1%}", f"{best.tokens:,.0f}", best.choice.mesh]
            fills[style := f"m{level}"] = _colour(level / LEVELS)
        canvas.box(x, y, WIDE - 1, HIGH - 1, style, round=0)
        ink = "" if style == "blank" else " light" if level > 0.6 * LEVELS else " on"
        for at, word in enumerate(said, 1):
            canvas.words(x + WIDE / 2, y + 5 + 17 * at, word, f"mid{ink}{' small' * (at == 3)}")
    canvas.words(12, TOP - 8, axes[0])
    for place, value in enumerate(rows):
        canvas.words(LEFT - 8, TOP + HIGH * place + 36, _shown(value), "end")
    for place, value in enumerate(columns):
        canvas.words(LEFT + WIDE * (place + 0.5), foot + 20, _shown(value), "mid")
    canvas.words(12, foot + 20, axes[1])
    return canvas.file(title, MARK, fills)


def _colour(share: float) -> str:
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(COLD, HOT, strict=True))


def _shown(value: int | str) -> str:
    return f"{value:,}" if isinstance(value, int) else value
