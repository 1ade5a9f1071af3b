"""In which order the stages of a pipeline do their work: by name, from the plan's file, or made for what stages cost.

Purpose: homes and rows of `Pipeline.settings`, for the plan's sizes and for others.  Non-goals: messages
(`schedules.messages`), whether rows are right (`schedules.check`).
"""

from collections.abc import Callable

from .cost import Cost, cost
from .ir import Pipeline, Program, types
from .schedules.actions import Schedule
from .schedules.generate import SCHEDULES, looped
from .schedules.holding import Room
from .schedules.impossible import Impossible
from .schedules.listing import listed
from .schedules.timeline import Times
from .settings import AUTO
from .stages import forward, groups, stages

MOST = 2**17
"""Forwards in a schedule: with 16 ranks of 4 stages each, 2048 microbatches."""


def homes(pipeline: Pipeline, ranks: int) -> tuple[int, ...]:
    """The rank of each stage.  Raises Impossible."""
    order = pipeline.settings.schedule
    if pipeline.given:
        return pipeline.given.homes
    if order.kind == AUTO:
        return looped(ranks, order.chunks or 1)
    return SCHEDULES[order.kind].homes(ranks, order.chunks)


def rows(
    pipeline: Pipeline, ranks: int, microbatches: int, times: Times, room: Callable[[], Room], splits: bool
) -> Schedule:
    """The rows, without messages; `times`, `room` and `splits` are for those made for them.  Raises Impossible."""
    order, placed = pipeline.settings.schedule, homes(pipeline, ranks)
    if (forwards := len(placed) * microbatches) > MOST:
        raise Impossible(
            f"{len(placed)} stages × {microbatches} microbatches = {forwards:,} forwards are too many to be listed",
            f"at most {MOST:,}: take larger microbatches",
        )
    if pipeline.given:
        return pipeline.given
    if order.kind == AUTO:
        return listed(placed, microbatches, times, room(), splits)
    return SCHEDULES[order.kind](ranks, microbatches, order.chunks)


def estimated(program: Program, pipeline: Pipeline) -> Times:
    """How long each stage works for a microbatch, in parts of what the dearest one's forward takes."""
    of = types(program)
    bodies, repeats = groups(pipeline, forward(program).body)
    between = [cost(program, body, of) for body in bodies]
    turn = [cost(program, repeat.body, of) for repeat in repeats]
    costs = [
        sum((between[i] for i in stage.groups), Cost())
        + sum((each * len(turns) for each, turns in zip(turn, stage.turns, strict=True)), Cost())
        for stage in stages(program, pipeline)
    ]
    unit = max(each.forward for each in costs)
    return Times(
        tuple(max(each.forward / unit, _LEAST) for each in costs),
        tuple(max(each.input / unit, _LEAST) for each in costs),
        tuple(max(each.weight / unit, _LEAST) for each in costs),
    )


_LEAST = 1e-3
"""What an action takes that computes next to nothing."""
