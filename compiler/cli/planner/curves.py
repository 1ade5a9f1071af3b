"""Pictures of a sweep as SVG: curves over one axis, a heat map over two."""

from collections.abc import Sequence
from itertools import pairwise
from math import log2
from typing import Any

from ...syntax.package_data import filled
from .sweep import Point

MARK = "Drawn by scalec plan"

LEFT, TOP, PANEL, GAP, STEP = 90, 70, 180, 60, 96
"""Pixels: left of the panels, above them, their height, between them, at least from one point to the next."""

CELL = "; in a cell MFU, tokens/s/GPU, the mesh of the best plan"

COLD, HOT = (247, 251, 255), (8, 81, 156)
"""The colours of no MFU and of the highest."""


def svg(points: Sequence[Point], title: str, source: str) -> str:
    """The text of the file."""
    axes = [*points[0].values]
    return _curves(points, axes[0], title, source) if len(axes) == 1 else _heat(points, axes, title, source)


def _curves(points: Sequence[Point], axis: str, title: str, source: str) -> str:
    numbers = [it.values[axis] for it in points]
    at = [log2(it) for it in numbers if isinstance(it, int)] if all(isinstance(it, int) for it in numbers) else []
    at = at if len(at) == len(points) else [float(place) for place in range(len(points))]
    closest = min((b - a for a, b in pairwise(at)), default=1.0) or 1.0
    xs = [LEFT + 30 + (it - at[0]) / closest * STEP for it in at]
    measures: list[tuple[str, list[float | None], str]] = [
        ("tokens/s/GPU", [it.best.tokens if it.best else None for it in points], ",.0f"),
        ("MFU, %", [it.best.mfu * 100 if it.best else None for it in points], ".1f"),
    ]
    panels = [_panel(TOP + place * (PANEL + GAP), xs, *measure) for place, measure in enumerate(measures)]
    foot = TOP + 2 * (PANEL + GAP) + 10
    rows = [
        {
            "y": foot + 20 * place,
            "value": _shown(it.values[axis]),
            "plan": str(it.best.choice) if it.best else "nothing fits",
        }
        for place, it in enumerate(points)
    ]
    cliffs = [
        {"x": (xs[place] + xs[place - 1]) / 2, "number": number, "why": it.cliff, "value": _shown(it.values[axis])}
        for number, (place, it) in enumerate(((p, it) for p, it in enumerate(points) if it.cliff), 1)
    ]
    words = [title, *(f"{row['value']} {row['plan']}" for row in rows)]
    return filled(
        "curves.svg.j2",
        escaped=True,
        mark=MARK,
        title=title,
        source=source,
        axis=axis,
        width=max(round(xs[-1]) + 60, 60 + 8 * max(map(len, words))),
        height=foot + 20 * (len(rows) + len(cliffs)) + 20,
        left=LEFT,
        right=round(xs[-1]) + 30,
        top=TOP,
        bottom=TOP + 2 * PANEL + GAP,
        ticks=[(x, _shown(it.values[axis])) for x, it in zip(xs, points, strict=True)],
        panels=panels,
        rows=rows,
        cliffs=cliffs,
        notes=foot + 20 * len(rows),
    )


def _panel(top: int, xs: Sequence[float], name: str, values: Sequence[float | None], form: str) -> dict[str, Any]:
    """A curve, its points labelled, over lines at round numbers."""
    most = max((it for it in values if it is not None), default=1.0)
    step = _round(most / 5)
    high = step * (int(most / step) + 1)
    places = [
        (x, top + PANEL * (1 - it / high), format(it, form)) for x, it in zip(xs, values, strict=True) if it is not None
    ]
    lines = [(top + PANEL * (1 - step * i / high), format(step * i, ",.0f")) for i in range(int(high / step) + 1)]
    return {
        "name": name,
        "top": top,
        "points": places,
        "lines": lines,
        "path": " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places),
    }


def _round(number: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** int(f"{number:e}".split("e")[1])
    return next(each * power for each in (1, 2, 5, 10) if each * power >= number)


def _heat(points: Sequence[Point], axes: Sequence[str], title: str, source: str) -> str:
    rows, columns = ([*dict.fromkeys(it.values[axis] for it in points)] for axis in axes)
    most = max((it.best.mfu for it in points if it.best), default=1.0)
    cells: list[dict[str, Any]] = []
    for it in points:
        x, y = LEFT + 150 * columns.index(it.values[axes[1]]), TOP + 64 * rows.index(it.values[axes[0]])
        share = it.best.mfu / most if it.best else 0.0
        fill = "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(COLD, HOT, strict=True))
        said = (
            (f"{it.best.mfu:.1%}", f"{it.best.tokens:,.0f}", it.best.choice.mesh)
            if it.best
            else ("does not fit", "", "")
        )
        cells.append({"x": x, "y": y, "fill": fill if it.best else "#eeeeee", "light": share > 0.6, "said": said})
    return filled(
        "heat.svg.j2",
        escaped=True,
        mark=MARK,
        title=title,
        source=f"{source}{CELL}",
        axes=axes,
        left=LEFT,
        top=TOP,
        width=max(LEFT + 150 * len(columns) + 20, 40 + 8 * (len(source) + len(CELL))),
        height=TOP + 64 * len(rows) + 60,
        rows=[(TOP + 64 * place, _shown(it)) for place, it in enumerate(rows)],
        columns=[(LEFT + 150 * place, _shown(it)) for place, it in enumerate(columns)],
        foot=TOP + 64 * len(rows),
        cells=cells,
    )


def _shown(value: int | str) -> str:
    return f"{value:,}" if isinstance(value, int) else value
