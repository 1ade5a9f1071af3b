"""The best plan at each of many points: GPUs, sequences, batches, sizes of the model, machines;
pictures of these.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from math import log2

from attrs import evolve, frozen

from ...frontend import resolve
from ...reports.drawing import Canvas, ticks, wide
from ...syntax.diagnostics import PlanError
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
"""The goal at some values of what is swept."""


@frozen
class Point:
    """The best plan at some values of what is swept; None where nothing fits."""

    values: Values
    goal: Goal
    best: Priced | None
    cliff: str = ""
    """Why a GPU does less than at the point before, "" where it does not."""


def swept(
    file: ModelFile,
    goals: Goals,
    kept: Mapping[str, object],
    axes: Mapping[str, Sequence[int | str]],
    tell: Tell = silent,
) -> list[Point]:
    """The points of one or two axes, the last one fastest; cliffs are along it if it is of numbers.

    Each is said to `tell` before it is looked for.  Raises PlanError.
    """
    known, points, places = dict[object, Cells](), list[Point](), list(product(*axes.values()))
    for number, place in enumerate(places, start=1):
        values = dict(zip(axes, place, strict=True))
        words = ", ".join(f"{name} {value}" for name, value in values.items())
        tell(f"point {number} of {len(places)}: {words}")
        points.append(_point(file, goals, kept, values, known))
    last = [*axes.values()][-1]
    width = len(last) if isinstance(last[0], int) else 1
    return [
        evolve(it, cliff=cliff(points[at - 1], it) if at % width else "")
        for at, it in enumerate(points)
    ]


def _point(
    file: ModelFile,
    goals: Goals,
    kept: Mapping[str, object],
    values: Values,
    known: dict[object, Cells],
) -> Point:
    goal = goals(values)
    own = {name: int(size) for name, size in values.items() if name not in (*GOALS, *DEGREES)}
    sized = evolve(file, dims=tuple(own.items()))
    kept_here = {**kept, **{name: values[name] for name in DEGREES if name in values}}
    try:
        facts = Facts(resolve(bare_plan(sized, goal)))
    except PlanError as error:
        if sized.dims and error.diagnostics[0].code in DIVIDES:
            return Point(values, goal, None)
        raise
    cells = known.setdefault((sized.dims, goal.seq, goal.hardware.name), {})
    found = search(sized, facts, goal, kept_here, proved=0, cells=cells)
    return Point(values, goal, next(iter(found.fitting), None))


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
    for axis, name in (("tp", "tensor"), ("cp", "context"), ("ep", "expert")):
        if getattr(new, axis) > getattr(old, axis):
            left = (
                "no sequences left to share: "
                if new.replicas * new.microbatch == goal.global_batch
                else ""
            )
            yield (
                f"{left}{name} parallelism of {getattr(new, axis)} in place of {getattr(old, axis)}"
            )
    if old.recompute == NONE != new.recompute or (new.recompute == FULL != old.recompute):
        yield f"recompute {new.recompute} in place of {old.recompute}"
    count = goal.global_batch // (new.microbatch * new.replicas)
    if count == 1 < was_goal.global_batch // (old.microbatch * old.replicas):
        yield "one microbatch left"
    if now.bubble - was.bubble > now.exposed - was.exposed and now.bubble > was.bubble:
        yield (
            f"{count} microbatches for {new.pp} stages: bubble {now.bubble:.0%} in place of"
            f" {was.bubble:.0%}"
        )
    if now.exposed > was.exposed:
        yield f"GPUs wait for links: {now.exposed:.0%} in place of {was.exposed:.0%} of a step"
    if goal.seq > was_goal.seq:
        yield "attention grows with the sequence"
    yield "more work for a token"


def csv(points: Sequence[Point]) -> str:
    """A line for each point."""
    lines = [
        [
            *points[0].values,
            "seconds",
            "tokens_per_second_per_gpu",
            "mfu",
            "needs_gib",
            "plan",
            "cliff",
        ]
    ]
    for it in points:
        best = it.best
        figures = (
            [
                f"{best.seconds:.6g}",
                f"{best.tokens:.6g}",
                f"{best.mfu:.4f}",
                f"{best.needs / 2**30:.2f}",
                f'"{best.choice}"',
            ]
            if best
            else ["", "", "", "", ""]
        )
        lines.append([*map(str, it.values.values()), *figures, f'"{it.cliff}"' if it.cliff else ""])
    return "".join(f"{','.join(line)}\n" for line in lines)


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
    return (
        _curves(points, axes[0], title, source)
        if len(axes) == 1
        else _heat(points, axes, title, source)
    )


def _canvas(width: float, title: str, source: str) -> Canvas:
    canvas = Canvas(max(width, 24 + max(wide(title), wide(source))))
    canvas.words(12, 20, title, "head")
    canvas.words(12, 38, source)
    return canvas


def _curves(points: Sequence[Point], axis: str, title: str, source: str) -> str:
    """Throughput and MFU, each in a panel, then the plans, then why throughput falls where it
    does.
    """
    xs, values = (
        _places([it.values[axis] for it in points]),
        [_shown(it.values[axis]) for it in points],
    )
    plans = [str(it.best.choice) if it.best else "nothing fits" for it in points]
    canvas = _canvas(max(xs[-1] + 60, LEFT + 20 + max(map(wide, plans))), title, source)
    bottom = TOP + 2 * PANEL + GAP
    _panel(
        canvas,
        TOP,
        xs,
        "tokens/s/GPU",
        [it.best.tokens if it.best else None for it in points],
        ",.0f",
    )
    _panel(
        canvas,
        TOP + PANEL + GAP,
        xs,
        "MFU, %",
        [it.best.mfu * 100 if it.best else None for it in points],
        ".1f",
    )
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
    canvas: Canvas,
    top: float,
    xs: Sequence[float],
    name: str,
    values: Sequence[float | None],
    form: str,
) -> None:
    """A curve, its points labelled, over lines at round numbers."""
    high = 1.1 * max((it for it in values if it is not None), default=1.0)
    canvas.words(12, top - 10, name)
    for tick in ticks(high):
        y = top + PANEL * (1 - tick / high)
        canvas.line(LEFT, y, xs[-1] + 30, y)
        canvas.words(LEFT - 6, y + 4, f"{tick:,.10g}", "end muted")
    places = [
        (x, top + PANEL * (1 - it / high), it)
        for x, it in zip(xs, values, strict=True)
        if it is not None
    ]
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
        x, y = (
            LEFT + WIDE * columns.index(it.values[axes[1]]),
            TOP + HIGH * rows.index(it.values[axes[0]]),
        )
        level, said, style = 0, ["does not fit"], "blank"
        if best := it.best:
            level, said = (
                round(LEVELS * best.mfu / most),
                [f"{best.mfu:.1%}", f"{best.tokens:,.0f}", best.choice.mesh],
            )
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
    return "#" + "".join(
        f"{round(a + (b - a) * share):02x}" for a, b in zip(COLD, HOT, strict=True)
    )


def _shown(value: int | str) -> str:
    return f"{value:,}" if isinstance(value, int) else value
