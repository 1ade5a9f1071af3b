"""Where the stages of a pipeline lie, the order that they work in, and how long that takes.

Purpose: `stage_to_rank` and rows of `Pipeline.settings`, for the plan's sizes and for others.
Non-goals: rows made for what stages cost (`tuning.decisions`), whether rows are right
(`schedules.check`).
"""

from functools import lru_cache

from attrs import evolve

from ..config.settings import AUTO
from ..ir import MICROBATCHES, Pipeline, Program
from ..ir.stages import groups, stages
from ..schedules.actions import Schedule, ScheduleError
from ..schedules.p2p import with_messages
from ..schedules.registry import SCHEDULES, loop_placement, v_placement
from ..schedules.timeline import Times
from .flops import Cost, cost

MOST = 2**17
"""Forwards in a schedule: with 16 ranks of 4 stages each, 2048 microbatches."""


def placements(pipeline: Pipeline, ranks: int) -> tuple[tuple[int, ...], ...]:
    """The ranks of all stages; for `auto` all ways that are tried, of as many stages each.

    Raises ScheduleError.
    """
    order = pipeline.settings.schedule
    if pipeline.rows:
        return (pipeline.rows.stage_to_rank,)
    if order.kind == AUTO:
        chunks = order.chunks or 1
        return tuple(dict.fromkeys((loop_placement(ranks, chunks), v_placement(ranks, chunks))))
    return (SCHEDULES[order.kind].stage_to_rank(ranks, order.chunks),)


def stage_to_rank(pipeline: Pipeline, ranks: int) -> tuple[int, ...]:
    """The first of the placements.  Raises ScheduleError."""
    return placements(pipeline, ranks)[0]


def with_schedule(program: Program, pipeline: Pipeline) -> Pipeline:
    """The pipeline with the rows and messages of a step of `program`.  Raises ScheduleError."""
    schedule = rows(pipeline, program.axis(pipeline.axis).size, program.size(MICROBATCHES))
    return evolve(pipeline, schedule=with_messages(schedule, estimate_times(program, pipeline)))


def rows(pipeline: Pipeline, ranks: int, microbatches: int) -> Schedule:
    """The rows, without messages.  Raises ScheduleError."""
    check_few_forwards(len(stage_to_rank(pipeline, ranks)), microbatches)
    order = pipeline.settings.schedule
    return pipeline.rows or _make_named_schedule(order.kind, ranks, microbatches, order.chunks)


@lru_cache(maxsize=4)
def _make_named_schedule(kind: str, ranks: int, microbatches: int, chunks: int | None) -> Schedule:
    return SCHEDULES[kind](ranks, microbatches, chunks)


def check_few_forwards(stages: int, microbatches: int) -> None:
    """Raises ScheduleError where there are more forwards than can be listed."""
    if (forwards := stages * microbatches) > MOST:
        raise ScheduleError(
            f"{stages} stages × {microbatches} microbatches = {forwards:,} forwards are too"
            " many to be listed",
            f"at most {MOST:,}: take larger microbatches",
        )


def estimate_times(program: Program, pipeline: Pipeline) -> Times:
    """How long each stage works for a microbatch, in parts of the time that the dearest stage's
    forward takes.
    """
    bodies, repeats = groups(pipeline, program.forward.body)
    group_costs = [cost(program, body) for body in bodies]
    layer_costs = [cost(program, repeat.body) for repeat in repeats]
    costs = list[Cost]()
    for stage in stages(program, pipeline):
        total = sum((group_costs[group] for group in stage.groups), Cost())
        for layer_cost, layers in zip(layer_costs, stage.layers, strict=True):
            total += layer_cost * len(layers)
        costs.append(total)
    unit = max(stage_cost.forward for stage_cost in costs)
    forward, input, weight = list[float](), list[float](), list[float]()
    for stage_cost in costs:
        forward.append(max(stage_cost.forward / unit, LEAST))
        input.append(max(stage_cost.input / unit, LEAST))
        weight.append(max(stage_cost.weight / unit, LEAST))
    return Times(tuple(forward), tuple(input), tuple(weight))


LEAST = 1e-3
"""The least time of an action: one that computes next to nothing."""
