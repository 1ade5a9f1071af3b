"""The best plan at each of many points: GPUs, sequences, batches, sizes of the model, machines.
Draws the points.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from math import log2

from attrs import evolve, frozen

from ...compiler.frontend import resolve
from ...compiler.syntax.diagnostics import PlanError
from ..drawing import Canvas, text_width, ticks
from .cells import Cells
from .choice import FULL, NONE
from .exact import Priced
from .facts import Facts, Goal
from .plan_text import ModelFile, bare_plan
from .search import Tell, search, silent

CLIFF = 0.1
"""The part of a GPU's throughput that is lost from one point to the next where there is a cliff."""

Values = Mapping[str, int | str]
Goals = Callable[[Values], Goal]
"""The goal at some values of the axes of a sweep."""


@frozen
class Point:
    """The best plan at some values of the axes of a sweep; None where nothing fits."""

    values: Values
    goal: Goal
    best: Priced | None
    cliff: str = ""
    """Why a GPU does less than at the point before; "" where it does not."""


def find_points(
    file: ModelFile,
    goals: Goals,
    kept: Mapping[str, object],
    axes: Mapping[str, Sequence[int | str]],
    tell: Tell = silent,
) -> list[Point]:
    """The points of one or two axes, the last one fastest; cliffs are along it if it is of numbers.

    Calls `tell` with a line before each point.  Raises PlanError.
    """
    cells, points, places = dict[object, Cells](), list[Point](), list(product(*axes.values()))
    for number, place in enumerate(places, start=1):
        values = dict(zip(axes, place, strict=True))
        words = ", ".join(f"{name} {value}" for name, value in values.items())
        tell(f"point {number} of {len(places)}: {words}")
        points.append(_point(file, goals, kept, values, cells))
    last = [*axes.values()][-1]
    width = len(last) if isinstance(last[0], int) else 1
    with_cliffs = list[Point]()
    for index, point in enumerate(points):
        if index % width:
            point = evolve(point, cliff=cliff(points[index - 1], point))
        with_cliffs.append(point)
    return with_cliffs


def _point(
    file: ModelFile,
    goals: Goals,
    kept: Mapping[str, object],
    values: Values,
    cells_by_model: dict[object, Cells],
) -> Point:
    goal = goals(values)
    sizes, kept_here = dict[str, int](), dict(kept)
    for name, value in values.items():
        if name in DEGREES:
            kept_here[name] = value
        elif name not in GOALS:
            sizes[name] = int(value)
    sized = evolve(file, dims=tuple(sizes.items()))
    try:
        facts = Facts(resolve(bare_plan(sized, goal)))
    except PlanError as error:
        if sized.dims and error.diagnostics[0].code in DIVIDES:
            return Point(values, goal, None)
        raise
    cells = cells_by_model.setdefault((sized.dims, goal.seq, goal.hardware.name), {})
    result = search(sized, facts, goal, kept_here, proved=0, cells=cells)
    return Point(values, goal, next(iter(result.fitting), None))


GOALS = ("gpus", "global_batch", "seq", "cluster")
"""Goals that a sweep varies besides sizes of the model."""

DEGREES = ("tp", "cp", "ep", "pp")
"""Degrees of parallelism that a sweep varies: at each point, plans with this degree compete."""

DIVIDES = ("E0303", "E0311")
"""Mistakes of a model whose sizes do not fit together."""


def cliff(before: Point, after: Point) -> str:
    """Why a GPU does a tenth less than at the point before; "" where it does not."""
    if before.best is None:
        return ""
    if after.best is None:
        return "nothing fits"
    if after.best.tokens > before.best.tokens * (1 - CLIFF):
        return ""
    return next(_causes(before.goal, before.best, after.goal, after.best))


def _causes(was_goal: Goal, was: Priced, goal: Goal, now: Priced) -> Iterator[str]:
    """Changes that may have made steps slower, the most telling first."""
    old, new = was.choice, now.choice
    if was_goal.gpus <= was_goal.hardware.ranks_per_node < goal.gpus:
        yield "crosses nodes"
    if old.tp <= goal.per_node < new.tp:
        yield "tensor parallelism leaves the node"
    prefix = ""
    if new.replicas * new.microbatch == goal.global_batch:
        prefix = "no sequences left to share: "
    for axis, name in (("tp", "tensor"), ("cp", "context"), ("ep", "expert")):
        degree, old_degree = getattr(new, axis), getattr(old, axis)
        if degree > old_degree:
            yield f"{prefix}{name} parallelism of {degree} in place of {old_degree}"
    if old.recompute == NONE != new.recompute or (new.recompute == FULL != old.recompute):
        yield f"recompute {new.recompute} in place of {old.recompute}"
    count = goal.global_batch // (new.microbatch * new.replicas)
    if count == 1 < was_goal.global_batch // (old.microbatch * old.replicas):
        yield "one microbatch left"
    if (
        now.bubble_share - was.bubble_share > now.exposed_share - was.exposed_share
        and now.bubble_share > was.bubble_share
    ):
        yield (
            f"{count} microbatches for {new.pp} stages: bubble {now.bubble_share:.0%} in place of"
            f" {was.bubble_share:.0%}"
        )
    if now.exposed_share > was.exposed_share:
        shares = f"{now.exposed_share:.0%} in place of {was.exposed_share:.0%}"
        yield f"GPUs wait for links: {shares} of a step"
    if goal.seq > was_goal.seq:
        yield "attention grows with the sequence"
    yield "more work for a token"


def csv(points: Sequence[Point]) -> str:
    """A line for each point."""
    lines = [[*points[0].values, *FIGURES, "cliff"]]
    for point in points:
        figures = [""] * len(FIGURES)
        if best := point.best:
            figures = [
                f"{best.seconds:.6g}",
                f"{best.tokens:.6g}",
                f"{best.mfu:.4f}",
                f"{best.needs / 2**30:.2f}",
                f'"{best.choice}"',
            ]
        quoted = f'"{point.cliff}"' if point.cliff else ""
        lines.append([*map(str, point.values.values()), *figures, quoted])
    return "".join(f"{','.join(line)}\n" for line in lines)


FIGURES = ("seconds", "tokens_per_second_per_gpu", "mfu", "needs_gib", "plan")
"""Columns of the best plan at a point."""

MARK = "Drawn by scalec plan"

LEFT, TOP, PANEL, GAP, STEP, LINE = 90, 70, 180, 60, 96, 20
"""Pixels: left of the panels, above them, their height, between them, from one point to the
next at least, a line.
"""

CELL, WIDE, HIGH = "; in a cell MFU, tokens/s/GPU, the mesh of the best plan", 150, 64

COLD, HOT, LEVELS = (247, 251, 255), (8, 81, 156), 20
"""The colours of no MFU and of the highest, and how many there are between them."""


def svg(points: Sequence[Point], title: str, source: str) -> str:
    """The text of the file."""
    axes = [*points[0].values]
    if len(axes) == 1:
        return _curves(points, axes[0], title, source)
    return _heat(points, axes, title, source)


def _canvas(width: float, title: str, source: str) -> Canvas:
    canvas = Canvas(max(width, 24 + max(text_width(title), text_width(source))))
    canvas.words(12, 20, title, "head")
    canvas.words(12, 38, source)
    return canvas


def _curves(points: Sequence[Point], axis: str, title: str, source: str) -> str:
    """Throughput and MFU, each in a panel, then the plans, then why throughput falls where it
    does.
    """
    xs = _places([point.values[axis] for point in points])
    values = [_value_text(point.values[axis]) for point in points]
    plans, throughputs, percents = list[str](), list[float | None](), list[float | None]()
    for point in points:
        best = point.best
        plans.append(str(best.choice) if best else "nothing fits")
        throughputs.append(best.tokens if best else None)
        percents.append(best.mfu * 100 if best else None)
    canvas = _canvas(max(xs[-1] + 60, LEFT + 20 + max(map(text_width, plans))), title, source)
    bottom = TOP + 2 * PANEL + GAP
    _panel(canvas, TOP, xs, "tokens/s/GPU", throughputs, ",.0f")
    _panel(canvas, TOP + PANEL + GAP, xs, "MFU, %", percents, ".1f")
    canvas.words(12, bottom + 18, axis)
    y = bottom + GAP + 10
    for x, value, plan in zip(xs, values, plans, strict=True):
        canvas.words(x, bottom + 18, value, "mid")
        canvas.words(LEFT - 6, y, value, "end")
        canvas.words(LEFT + 6, y, plan)
        y += LINE
    number = 0
    for place, point in enumerate(points):
        if not point.cliff:
            continue
        number += 1
        x = (xs[place] + xs[place - 1]) / 2
        canvas.line(x, TOP, x, bottom, "cap")
        canvas.words(x, TOP - 6, f"({number})", "mid alarm")
        canvas.words(12, y, f"({number}) at {values[place]}: {point.cliff}", "alarm")
        y += LINE
    return canvas.file(title, MARK)


def _places(values: Sequence[int | str]) -> list[float]:
    """Where points lie: numbers by their logarithms, words at equal distances."""
    places = [log2(value) for value in values if isinstance(value, int)]
    if len(places) < len(values):
        places = [float(index) for index in range(len(values))]
    closest = min((after - before for before, after in pairwise(places)), default=1.0) or 1.0
    return [LEFT + 30 + (place - places[0]) / closest * STEP for place in places]


def _panel(
    canvas: Canvas,
    top: float,
    xs: Sequence[float],
    name: str,
    values: Sequence[float | None],
    form: str,
) -> None:
    """A curve, its points labelled, over lines at round numbers."""
    high = 1.1 * max((value for value in values if value is not None), default=1.0)
    canvas.words(12, top - 10, name)
    for tick in ticks(high):
        y = top + PANEL * (1 - tick / high)
        canvas.line(LEFT, y, xs[-1] + 30, y)
        canvas.words(LEFT - 6, y + 4, f"{tick:,.10g}", "end muted")
    places, shown_values = list[tuple[float, float]](), list[float]()
    for x, value in zip(xs, values, strict=True):
        if value is not None:
            places.append((x, top + PANEL * (1 - value / high)))
            shown_values.append(value)
    if places:
        canvas.path(places, "trace l0")
    for (x, y), value in zip(places, shown_values, strict=True):
        canvas.dot(x, y, 3, "s0")
        canvas.words(x, y - 8, format(value, form), "mid")


def _heat(points: Sequence[Point], axes: Sequence[str], title: str, source: str) -> str:
    """MFU by colours, in a table of the values of two axes."""
    rows = [*dict.fromkeys(point.values[axes[0]] for point in points)]
    columns = [*dict.fromkeys(point.values[axes[1]] for point in points)]
    most = max((point.best.mfu for point in points if point.best), default=1.0)
    foot, fills = TOP + HIGH * len(rows), {"light": "#ffffff"}
    canvas = _canvas(LEFT + WIDE * len(columns) + 20, title, f"{source}{CELL}")
    for point in points:
        row, column = rows.index(point.values[axes[0]]), columns.index(point.values[axes[1]])
        level = round(LEVELS * point.best.mfu / most) if point.best else None
        if level is not None:
            fills[f"m{level}"] = _colour(level / LEVELS)
        _cell(canvas, LEFT + WIDE * column, TOP + HIGH * row, point.best, level)
    canvas.words(12, TOP - 8, axes[0])
    for place, value in enumerate(rows):
        canvas.words(LEFT - 8, TOP + HIGH * place + 36, _value_text(value), "end")
    for place, value in enumerate(columns):
        canvas.words(LEFT + WIDE * (place + 0.5), foot + 20, _value_text(value), "mid")
    canvas.words(12, foot + 20, axes[1])
    return canvas.file(title, MARK, fills)


def _cell(canvas: Canvas, x: float, y: float, best: Priced | None, level: int | None) -> None:
    """A point's MFU, throughput and mesh, over the colour of a level."""
    words, style, ink = ["does not fit"], "blank", ""
    if best and level is not None:
        words = [f"{best.mfu:.1%}", f"{best.tokens:,.0f}", best.choice.mesh]
        style = f"m{level}"
        ink = " light" if level > 0.6 * LEVELS else " on"
    canvas.box(x, y, WIDE - 1, HIGH - 1, style, round=0)
    for number, word in enumerate(words, 1):
        small = " small" if number == 3 else ""
        canvas.words(x + WIDE / 2, y + 5 + 17 * number, word, f"mid{ink}{small}")


def _colour(share: float) -> str:
    parts = list[str]()
    for cold, hot in zip(COLD, HOT, strict=True):
        parts.append(f"{round(cold + (hot - cold) * share):02x}")
    return "#" + "".join(parts)


def _value_text(value: int | str) -> str:
    return f"{value:,}" if isinstance(value, int) else value
