"""Mistakes that passes would find in a program that has others already, so that all are told at
once.

Before: `resolve` or a pass, which has found some.  Non-goals: a program to go on with;
mistakes of bytes, of `recompute = auto` (E0419) and of `schedule = auto(memory=60GiB)` (E0517):
each size and degree has a part in them, so that any other mistake leaves them in doubt, and to find
them takes as long as compiling.
"""

from ..analysis.recompute import check as check_recomputed
from ..config.settings import AUTO
from ..frontend.validate import validate
from ..ir import Program
from ..passes.choose_layout import choose_layout
from ..passes.flatten_sums import flatten_sums
from ..passes.insert_collectives import insert_collectives
from ..passes.partition_stages import with_stages
from ..passes.propagate import propagate
from ..passes.schedule_pipeline import demand_rows
from ..passes.split_axes import factor_axes
from ..syntax.codes import PLACELESS, WHOLE, get_code
from ..syntax.diagnostics import Diagnostics
from .decisions.choose_recompute import bound
from .decisions.place_stages import demand_microbatches

BEFORE = ("resolve", "validate", "choose_strategies")
"""The passes after which it is not known yet what each op works on."""


def raise_mistakes(program: Program, mistakes: Diagnostics) -> None:
    """Raises PlanError with `mistakes`, if there are any, and with the ones that later passes find
    in the sound parts of `program`, the last one that could be made.
    """
    if mistakes:
        with mistakes.catch():
            _look_ahead(program, mistakes)
    mistakes.check()


def _look_ahead(program: Program, diagnostics: Diagnostics) -> None:
    """Adds to the mistakes of a program what later passes find in its sound parts."""
    if program.after == "resolve":
        validate(program, diagnostics)  # also for the words that it puts in doubt
    with diagnostics.catch():
        _check_recompute(program, diagnostics)
    left = {get_code(code).leaves for code in diagnostics.codes}
    if PLACELESS in left or diagnostics.in_part & {"mesh", "shard"}:
        return
    is_sound = left <= {WHOLE} and not diagnostics.in_part & {"model", "statements", "loss"}
    is_whole = program.after != "resolve" or is_sound
    with diagnostics.catch():
        if is_whole:
            program = _cut_stages(program, diagnostics)
    if program.after in BEFORE:
        _check_placements(program, diagnostics, is_whole)


def _cut_stages(program: Program, diagnostics: Diagnostics) -> Program:
    """The program with its pipeline's stages, if it has any; rows are checked as far as they rest
    on counts.

    Raises PlanError.
    """
    if not (pipeline := program.pipeline):
        return program
    staged = program
    if not pipeline.layers:
        staged = with_stages(program, pipeline)
    demand = demand_rows
    if pipeline.settings.schedule.kind == AUTO:
        demand = demand_microbatches
    if (
        staged.pipeline
        and "train" not in diagnostics.in_part
        and not diagnostics.codes & {"E0310", "E0520"}
    ):
        with diagnostics.catch():
            demand(staged, staged.pipeline)
    return staged


def _check_placements(program: Program, diagnostics: Diagnostics, is_whole: bool) -> None:
    """Adds what is wrong with the work of single ops, and of a whole program with its
    collectives too.
    """
    count = diagnostics.count
    factored = program
    if not diagnostics.codes & {"E0311", "E0510"}:  # heads that cannot be divided
        factored = factor_axes(program)
    worked = propagate(flatten_sums(factored), diagnostics)
    if (
        is_whole
        and diagnostics.count == count
        and not any(claim.via == AUTO for claim in program.claims)
    ):
        with diagnostics.catch():
            insert_collectives(choose_layout(worked))


def _check_recompute(program: Program, diagnostics: Diagnostics) -> None:
    """Adds what is known to be wrong with a plan's `recompute` before anything is counted."""
    if program.train.recompute.word == AUTO and not any(
        code.startswith("E04") for code in diagnostics.codes
    ):
        bound(program)
    check_recomputed(program)
