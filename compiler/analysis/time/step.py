"""What a step takes in time: of a rank, or in a pipeline of the rank that is busy longest, with its bubble.

Non-goals: which other plan would take less.
"""

from ...ir import Program
from ..hardware import Hardware
from .breakdown import StepTime
from .pipeline import BUBBLE, of_pipeline
from .prices import prices
from .timeline import Walk

__all__ = ["BUBBLE", "StepTime", "step_time"]


def step_time(program: Program, on: Hardware) -> StepTime:
    """The time of a step of a program after the last pass."""
    if program.pipeline:
        return of_pipeline(program, program.pipeline, on)
    walk = Walk(program, on, prices(program, on))
    walk.step()
    return StepTime(walk.clocks.gpu, walk.clocks.spent, walk.clocks.sent)
