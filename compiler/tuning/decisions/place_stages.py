"""Decides where the stages of `schedule = auto` lie, by the rows that can be made of them.

Purpose: stage_to_rank and rows, without messages, that are the fastest for what stages cost and
ranks may hold.  Before: `place_state`.  Non-goals: schedules with names, whose stage_to_rank is
known (`analysis.stage_schedule`); messages (`schedule_pipeline`).
"""

from math import inf

from attrs import evolve

from ...analysis.memory import memory_budget
from ...analysis.stage_schedule import check_few_forwards, estimate_times, placements
from ...config.settings import AUTO, ON, Size
from ...ir import MICROBATCHES, Pipeline, Program
from ...passes.bucket_params import fuse_buckets
from ...passes.schedule_pipeline import impossible, sum_over_stages
from ...schedules.actions import ScheduleError
from ...schedules.activation_memory import MemoryBudget
from ...schedules.feasibility import Task
from ...schedules.list_scheduling import demand_memory, fastest
from ...schedules.timeline import Times
from ...syntax.diagnostics import PlanError
from ..variant import Variant


def place_stages(plan: Variant) -> Variant:
    """The variant with rows for its stages, if the plan leaves them to the compiler.

    Raises PlanError.
    """
    program, pipeline = plan.program, plan.program.pipeline
    if not pipeline or pipeline.rows or pipeline.settings.schedule.kind != AUTO:
        return plan
    try:
        rows = fastest(_tasks(program, pipeline), splits=program.train.compile != ON)
    except ScheduleError as error:
        raise PlanError([impossible(error, program, pipeline)]) from None
    placed = evolve(pipeline, stage_to_rank=rows.stage_to_rank, rows=rows)
    return plan.with_program(evolve(program, pipeline=placed))


def demand_microbatches(program: Program, pipeline: Pipeline) -> None:
    """Checks the counts of `schedule = auto`, which rest on no costs.

    Raises PlanError where there are too many forwards, or ranks may hold too few microbatches.
    """
    placed = placements(pipeline, program.axis(pipeline.axis).size)
    try:
        check_few_forwards(len(placed[0]), program.size(MICROBATCHES))
        if isinstance(pipeline.settings.schedule.memory, Size):
            return
        for stage_to_rank in placed:
            budget = _microbatch_budget(program, evolve(pipeline, stage_to_rank=stage_to_rank))
            demand_memory(stage_to_rank, budget)
    except ScheduleError as error:
        raise PlanError([impossible(error, program, pipeline)]) from None


def _tasks(program: Program, pipeline: Pipeline) -> list[Task]:
    """One for each way to lay the stages with which a microbatch fits in memory.

    Raises ScheduleError if none does.
    """
    check_few_forwards(len(pipeline.stage_to_rank), program.size(MICROBATCHES))
    tasks: list[Task] = []
    errors: list[ScheduleError] = []
    for stage_to_rank in placements(pipeline, program.axis(pipeline.axis).size):
        try:
            tasks.append(_task(program, evolve(pipeline, stage_to_rank=stage_to_rank)))
        except ScheduleError as error:
            errors.append(error)
    if not tasks:
        raise errors[0]
    return tasks


def _task(program: Program, pipeline: Pipeline) -> Task:
    """The task for rows on stages placed so: the costs of the step as later passes make it, and
    ranks' memory.
    """
    fused = fuse_buckets(evolve(program, pipeline=pipeline))
    step = sum_over_stages(fused, pipeline)
    return Task(
        pipeline.stage_to_rank,
        step.size(MICROBATCHES),
        _times(step, pipeline),
        _room(step, pipeline),
    )


def _times(step: Program, pipeline: Pipeline) -> Times:
    """The seconds of stages, or where nobody knows the cluster's GPU, their operations."""
    from ...analysis.hardware import hardware

    gpu = hardware(step)
    if not gpu:
        return estimate_times(step, pipeline)
    from ...analysis.stage_times import stage_times  # a plan without a cluster does without

    return stage_times(step, pipeline, gpu)


def _room(program: Program, pipeline: Pipeline) -> MemoryBudget:
    """The memory budget of ranks, in bytes or microbatches."""
    most = pipeline.settings.schedule.memory
    if isinstance(most, Size):
        return memory_budget(program, most.bytes)
    return _microbatch_budget(program, pipeline)


def _microbatch_budget(program: Program, pipeline: Pipeline) -> MemoryBudget:
    most, ranks = pipeline.settings.schedule.memory, program.axis(pipeline.axis).size
    assert not isinstance(most, Size), "place_stages: memory in bytes"
    if most is None:
        most = inf
    return MemoryBudget.of_microbatches(ranks, len(pipeline.stage_to_rank), most)
