"""What a step takes in time: of a rank, or in a pipeline of the rank that is busy longest, with its bubble.

Non-goals: which other plan would take less.
"""

from collections.abc import Mapping, Sequence
from itertools import repeat

from attrs import evolve, frozen

from ...ir import Pipeline, Program, Region, Stmt
from ...ir.stages import crossing
from ...ops import Message
from ...schedules.actions import Work
from ...schedules.cell_table import cell_table
from ...schedules.timeline import Times, simulate
from ..hardware import Hardware
from ..memory.liveness import is_put_off
from ..stage_program import StageProgram, rank_programs, stage_programs
from .prices import prices
from .seconds import of_message
from .timeline import Clocks, Seconds, Walk, add, nothing

BUBBLE = "bubble"
"""The kind of time in which a rank of a pipeline waits for others."""


@frozen
class StepTime:
    """The seconds of a step, `spent` by kind and plan line; and those in which each group's links are busy, by axes."""

    seconds: float
    spent: Seconds
    sent: Seconds
    rank: int | None = None
    """That along the pipeline's axis, if there is one."""

    @property
    def kinds(self) -> dict[str, float]:
        """The seconds of each kind."""
        found = dict[str, float]()
        for (kind, _), seconds in self.spent.items():
            found[kind] = found.get(kind, 0.0) + seconds
        return found


def step_time(program: Program, on: Hardware) -> StepTime:
    """The time of a step of a program after the last pass."""
    if pipeline := program.pipeline:
        return _of_pipeline(program, pipeline, on)
    walk = Walk(program, on, prices(program, on))
    walk.step()
    return StepTime(walk.clocks.gpu, walk.clocks.spent, walk.clocks.sent)


def _of_pipeline(program: Program, pipeline: Pipeline, on: Hardware) -> StepTime:
    """Rows as a simulation does them, between what each rank does before and after its row."""
    assert pipeline.schedule, "time: a pipeline without rows"
    parts = _of_stages(program, on)
    of = {kind: tuple(each[kind].gpu for each in parts) for kind in (Work.FORWARD, Work.INPUT, Work.WEIGHT)}
    times = Times(of[Work.FORWARD], of[Work.INPUT], of[Work.WEIGHT], _send(program, pipeline, on))
    timeline, counts = simulate(pipeline.schedule, times), cell_table(pipeline.schedule).counts
    busiest = max(range(len(timeline.slots)), key=timeline.busy)
    spent, sent = nothing(), nothing()
    for (stage, work), count in counts.items():
        if not work.is_message and pipeline.stage_to_rank[stage] == busiest:
            for kind in (Work.INPUT, Work.WEIGHT) if work is Work.BACKWARD else (work,):
                add(spent, parts[stage][kind].spent, count)
                add(sent, parts[stage][kind].sent, count)
    spent[BUBBLE, str(program.axis(pipeline.axis).span)] += timeline.idle(busiest)
    own = rank_programs(program)[busiest]
    around = Walk(own, on, prices(own, on, program.types))
    around.step(microbatches=False)
    add(spent, around.clocks.spent)
    add(sent, around.clocks.sent)
    return StepTime(timeline.total + around.clocks.gpu, spent, sent, busiest)


def _of_stages(program: Program, on: Hardware) -> list[Mapping[Work, Clocks]]:
    """The clocks of each stage; those that do the same ops in as many layers, as all in the middle, are walked once."""
    known, found = dict[object, Mapping[Work, Clocks]](), list[Mapping[Work, Clocks]]()
    for stage in stage_programs(program):
        stmts = (*stage.forward.body, *stage.backward.body)
        ops = (id(stmt.body) if isinstance(stmt, Region) else id(stmt) for stmt in stmts)
        key = (*map(len, stage.layers.values()), *ops)
        known[key] = known.get(key) or _parts(program, stage, on)
        found.append(known[key])
    return found


def _parts(program: Program, stage: StageProgram, on: Hardware) -> dict[Work, Clocks]:
    """The clocks after each part of a stage's work on a microbatch."""
    received = {value.name: value.type for value in (*stage.forward.inputs, *stage.backward.inputs)}
    backward = stage.backward.body
    bodies = {
        Work.FORWARD: stage.forward.body,
        Work.INPUT: _part(backward, put_off=False),
        Work.WEIGHT: _part(backward, put_off=True),
    }
    of, found = prices(stage.program, on, {**program.types, **received}), dict[Work, Clocks]()
    for work, body in bodies.items():
        walk = Walk(stage.program, on, of)
        walk.body(body)
        found[work] = walk.clocks
    return found


def _part(body: Sequence[Stmt], *, put_off: bool) -> tuple[Stmt, ...]:
    """The ops of a backward that make gradients of weights which may be put off, or the others."""
    return tuple(
        evolve(stmt, body=_part(stmt.body, put_off=put_off)) if isinstance(stmt, Region) else stmt
        for stmt in body
        if isinstance(stmt, Region) or is_put_off(stmt) == put_off
    )


def _send(program: Program, pipeline: Pipeline, on: Hardware) -> float:
    """Seconds in which the values of a microbatch cross from a stage to the next, at the cut with most."""
    most = 0.0
    for values in crossing(program, pipeline):
        sent = [Message("rotate", it.name, (pipeline.axis,), it.type.dtype, ()) for it in values]
        sizes = (program.elements(it.type) for it in values)
        most = max(most, sum(of_message(program, *each) for each in zip(sent, repeat(on), sizes)))
    return most
