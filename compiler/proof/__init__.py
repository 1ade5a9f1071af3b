"""Shows, before anything runs, that a sharded step computes the single-device step."""

from attrs import evolve

from ..analysis.certificate import Proof
from ..ir import Program
from ..syntax.diagnostics import PlanError
from .proof import FIRST, Case, UnequalError, cases, has_its_stages, keeps_sizes, prove

DEFECT = "the plan is not at fault: this is a bug in scalec; please report it with the plan"


def verify_alike(program: Program, model: Program, known: list[list[Case]]) -> None:
    """As `verify`, but for cases that are `known` to be equal; those of `program` are added.  Raises PlanError."""
    assert keeps_sizes(program, model), "verify: sizes or settings are not the plan's"
    assert has_its_stages(program), "verify: the stages are not those that the plan's forward has"
    if (own := cases(program, model)) not in known:
        verify(program, model)
        known.append(own)


def verify(program: Program, model: Program) -> Proof:
    """The result for `program`, after the last pass: its step is that of `model`, the plan before any placement.

    Raises PlanError with the first value that is wrong.
    """
    try:
        return prove(program, model)
    except UnequalError as error:
        from .locate import locate

        found = locate(error, program, model)
        raise PlanError([evolve(found, help=DEFECT) if model.after == FIRST else found]) from None
