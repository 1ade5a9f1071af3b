"""The passes and decisions, in order, and what runs between them.

Purpose: a pass is a function Program → Program; a decision takes one of several variants of a
program.  Between two of them, the program is checked and shown to who asks.
"""

from collections.abc import Callable, Sequence

from attrs import evolve

from ..analysis.verifier import check
from ..frontend import resolve_sound_parts
from ..frontend.validate import validate
from ..ir import Program
from ..passes.choose_layout import choose_layout
from ..passes.differentiate import differentiate
from ..passes.flatten_sums import flatten_sums
from ..passes.fuse_ops import fuse_ops
from ..passes.insert_collectives import insert_collectives
from ..passes.overlap_exchanges import overlap_exchanges
from ..passes.place_state import place_state
from ..passes.propagate import propagate
from ..passes.schedule_pipeline import schedule_pipeline
from ..passes.split_axes import factor_axes
from ..syntax.diagnostics import Diagnostics, PlanError
from ..syntax.limits import Reader, load
from ..syntax.source import Source
from .decisions.choose_bucket import choose_bucket
from .decisions.choose_recompute import choose_recompute
from .decisions.choose_strategy import choose_strategy
from .decisions.divide_stages import divide_stages
from .decisions.place_stages import place_stages
from .look_ahead import raise_mistakes
from .variant import Change, Decision, Pass, Variant

PASSES: tuple[Pass | Decision, ...] = (
    validate,
    Decision("choose_strategies", choose_strategy),
    Decision("divide_stages", divide_stages),
    factor_axes,
    flatten_sums,
    propagate,
    choose_layout,
    insert_collectives,
    fuse_ops,
    overlap_exchanges,
    Decision("choose_recomputed", choose_recompute),
    differentiate,
    place_state,
    Decision("place_stages", place_stages),
    Decision("fuse_buckets", choose_bucket),
    schedule_pipeline,
)


def _name(step: Pass | Decision) -> str:
    return step.name if isinstance(step, Decision) else step.__name__


PASS_NAMES = ("resolve", *map(_name, PASSES))
"""The names that `Program.after` has: after `resolve`, which makes a program of a plan, and after
each pass and decision.
"""

NEW_FORM = ("propagate", "insert_collectives", "differentiate")
"""The check asks for another form after these passes than before them, and so always looks at
what they make.
"""


def make_variant(program: Program, changes: Sequence[Change] = ()) -> Variant:
    """A program as a variant, with the passes that it has not been through."""
    return Variant(program, PASSES[PASS_NAMES.index(program.after) :], tuple(changes))


def _unseen(program: Program) -> None:
    pass


def lower(
    program: Program, until: str = PASS_NAMES[-1], seen: Callable[[Program], None] = _unseen
) -> Program:
    """Runs the passes that `program` has not been through, up to `until`.

    Each program on the way is checked, unless the pass left it as it was, and then `seen`.  Raises
    PlanError with all mistakes of the first pass that finds any, and with the mistakes of later
    passes that can be told beside them.
    """
    check(program)
    seen(program)
    variant, mistakes = make_variant(program), Diagnostics()
    try:
        for _ in range(PASS_NAMES.index(program.after), PASS_NAMES.index(until)):
            before, variant = variant.program, variant.next
            lowered = variant.program
            # a pass that changes nothing but `after` needs no second check
            if lowered.after in NEW_FORM or lowered != evolve(before, after=lowered.after):
                check(lowered)
            seen(lowered)
    except PlanError as error:
        mistakes.add(error)
    raise_mistakes(variant.program, mistakes)
    return variant.program


def resolve_plan(source: Source, over: Source | None = None, read: Reader = load) -> Program:
    """The program of a plan before any pass, as `resolve` makes it.

    Raises PlanError with all mistakes that `resolve` finds, and with the mistakes of later passes
    that can be told beside them.
    """
    resolved = resolve_sound_parts(source, over, read)
    raise_mistakes(resolved.program, resolved.mistakes)
    return resolved.program


def compile_plan(source: Source, until: str = PASS_NAMES[-1]) -> Program:
    """The program of a plan's text after the pass `until`.  Raises PlanError."""
    return lower(resolve_plan(source), until)
