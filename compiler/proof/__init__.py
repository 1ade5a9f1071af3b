"""Shows, before anything runs, that a sharded step computes the single-device step.

Purpose: `verify` for a program, `same` for two plans, `audit` for the verifier itself, `recorded` for a run.
Non-goals: types, which every pass is checked for (`wellformed`); the emitted text (`emit.readback`); rounding, kernels
and the network.  `docs/proof.md` has the argument.
"""

from attrs import evolve

from ..analysis.certificate import Proof
from ..ir import Program
from ..syntax.diagnostics import PlanError
from .proof import FIRST, UnequalError, prove

DEFECT = "the plan is not at fault: this is a bug in scalec; please report it with the plan"


def verify(program: Program, model: Program) -> Proof:
    """What was shown of `program`, after the last pass: its step is that of `model`, the plan before any placement.

    Raises PlanError with the first value that is wrong.
    """
    try:
        return prove(program, model)
    except UnequalError as error:
        from .locate import locate

        found = locate(error, program, model)
        raise PlanError([evolve(found, help=DEFECT) if model.stage == FIRST else found]) from None
