"""The time of a step: of any rank, or in a pipeline of the rank that is busy longest, with its
bubble.
"""

from ...ir import Program
from ..expert_loads import loads
from ..hardware import Hardware
from .clocks import StepTime
from .pipeline import get_pipeline_step_time
from .prices import prices
from .timeline import Walk


def step_time(program: Program, on: Hardware) -> StepTime:
    """The time of a step of a program after the last pass."""
    if program.pipeline:
        return get_pipeline_step_time(program, program.pipeline, on)
    walk = Walk(program, on, prices(program, on))
    walk.step()
    return StepTime(walk.clocks.gpu, walk.clocks.spent, walk.clocks.sent)


def times_by_load(program: Program, on: Hardware) -> dict[str, StepTime]:
    """The times of a step at an equal, the planned and the worst load of experts; none where
    all ranks get the same.
    """
    return {load.name: step_time(load.program, on) for load in loads(program)}
