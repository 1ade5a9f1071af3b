"""The best plan at each of many points: numbers of GPUs, sequences, batches, sizes of the model, machines."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

from attrs import evolve, frozen

from ...frontend import resolve
from ...syntax.diagnostics import PlanError
from .cells import Cells
from .choice import FULL, NONE
from .exact import Priced
from .facts import Facts, Goal
from .model_file import ModelFile
from .plan_text import bare_plan
from .search import search

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
    file: ModelFile, goals: Goals, kept: Mapping[str, object], axes: Mapping[str, Sequence[int | str]]
) -> list[Point]:
    """The points of one or two axes, the last one fastest; cliffs are along it if it is of numbers.

    Raises PlanError.
    """
    known = dict[object, Cells]()
    points = [_point(file, goals, kept, dict(zip(axes, at, strict=True)), known) for at in product(*axes.values())]
    last = [*axes.values()][-1]
    width = len(last) if isinstance(last[0], int) else 1
    return [evolve(it, cliff=cliff(points[at - 1], it) if at % width else "") for at, it in enumerate(points)]


def _point(
    file: ModelFile, goals: Goals, kept: Mapping[str, object], values: Values, known: dict[object, Cells]
) -> Point:
    goal = goals(values)
    sized = evolve(file, dims=tuple((name, int(size)) for name, size in values.items() if name not in GOALS))
    try:
        facts = Facts(resolve(bare_plan(sized, goal)))
    except PlanError as error:
        if sized.dims and error.diagnostics[0].code in DIVIDES:
            return Point(values, goal, None)
        raise
    cells = known.setdefault((sized.dims, goal.seq, goal.hardware.name), {})
    found = search(sized, facts, goal, kept, proved=0, cells=cells)
    return Point(values, goal, next(iter(found.fitting), None))


GOALS = ("gpus", "global_batch", "seq", "cluster")
"""Goals that a sweep varies besides sizes of the model."""

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
    for axis, name in (("tp", "tensor"), ("cp", "context"), ("ep", "expert")):
        if getattr(new, axis) > getattr(old, axis):
            left = "no sequences left to share: " if new.replicas * new.microbatch == goal.global_batch else ""
            yield f"{left}{name} parallelism of {getattr(new, axis)} in place of {getattr(old, axis)}"
    if old.recompute == NONE != new.recompute or (new.recompute == FULL != old.recompute):
        yield f"recompute {new.recompute} in place of {old.recompute}"
    count = goal.global_batch // (new.microbatch * new.replicas)
    if count == 1 < was_goal.global_batch // (old.microbatch * old.replicas):
        yield "one microbatch left"
    if now.bubble - was.bubble > now.exposed - was.exposed and now.bubble > was.bubble:
        yield f"{count} microbatches for {new.pp} stages: bubble {now.bubble:.0%} in place of {was.bubble:.0%}"
    if now.exposed > was.exposed:
        yield f"GPUs wait for links: {now.exposed:.0%} in place of {was.exposed:.0%} of a step"
    if goal.seq > was_goal.seq:
        yield "attention grows with the sequence"
    yield "more work for a token"


def csv(points: Sequence[Point]) -> str:
    """A line for each point."""
    lines = [[*points[0].values, "seconds", "tokens_per_second_per_gpu", "mfu", "needs_gib", "plan", "cliff"]]
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
