"""Makes the whole training step of a forward model: backward, accumulation, norm, clipping, update.

Purpose: step { leaves, count → microbatches { forward, backward } → leaf gradients → norm → clip →
update }.  Every forward coercion has its conjugate in backward; a value's gradient is placed by the
dual of its placement.  Before: `insert_collectives`.  Non-goals: how leaves are made and their
gradients reduced (`place_state`).
"""

from attrs import evolve

from ...analysis.recompute import check
from ...ir import Program
from .step import TrainingStep


def differentiate(program: Program) -> Program:
    """The program of the step.  Raises PlanError."""
    check(program)
    return evolve(program, region=TrainingStep(program).region())
