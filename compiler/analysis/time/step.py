"""Seconds of a step: of a rank, or in a pipeline of the rank that is busy longest, with its bubble.

Non-goals: which other plan would take less.
"""

from ...ir import Program
from ..expert_loads import loads, with_load
from ..hardware import Hardware
from .clocks import StepTime
from .pipeline import of_pipeline
from .prices import prices
from .timeline import Walk


def step_time(program: Program, on: Hardware, load: float = 1.0) -> StepTime:
    """The time of a step of a program after the last pass.

    `load` is how many equal shares of the rows of tokens the experts of the rank have that is waited for, the most that
    there can be if it is more.
    """
    if load != 1.0:
        program = with_load(program, load)
    if program.pipeline:
        return of_pipeline(program, program.pipeline, on)
    walk = Walk(program, on, prices(program, on))
    walk.step()
    return StepTime(walk.clocks.gpu, walk.clocks.spent, walk.clocks.sent)


def times_by_load(program: Program, on: Hardware) -> dict[str, StepTime]:
    """The times of a step at an equal, the planned and the worst load of experts; none where all ranks get the same."""
    return {it.name: step_time(it.program, on) for it in loads(program)}
