"""The passes, in order, and what runs between them.

Purpose: each pass is a function Program → Program; between two, the program is checked and shown to
who asks.
"""

from collections.abc import Callable, Iterator

from attrs import evolve

from ..analysis.elastic import smallest
from ..analysis.verifier import check
from ..frontend import resolve_sound_parts
from ..frontend.validate import validate
from ..ir import Program
from ..syntax.diagnostics import Diagnostics, PlanError
from ..syntax.limits import Reader, load
from ..syntax.source import Source
from . import bucket_params
from .choose_bucket import choose_bucket
from .choose_layout import choose_layout
from .choose_recompute import choose_recompute
from .choose_strategy import choose_strategy
from .differentiate import differentiate
from .flatten_sums import flatten_sums
from .fuse_ops import fuse_ops
from .insert_collectives import insert_collectives
from .look_ahead import raise_mistakes
from .overlap_exchanges import overlap_exchanges
from .partition_stages import cut_stages
from .place_stages import place_stages
from .place_state import place_state
from .propagate import propagate
from .schedule_pipeline import schedule_pipeline
from .split_axes import factor_axes

Pass = Callable[[Program], Program]


def _at_least_size(step: str) -> Pass:
    """Gives the program after the last pass, at the least size, for a choice of the pass `step`."""
    return lambda variant: smallest(
        [*lower_unchecked(evolve(variant, after=step), PASS_NAMES[-1])][-1]
    )


def choose_strategies(program: Program) -> Program:
    """`choose_strategy`, by what becomes of each."""
    return choose_strategy(program, _at_least_size("choose_strategies"))


def choose_recomputed(program: Program) -> Program:
    """`choose_recompute`, by what becomes of each choice."""
    return choose_recompute(program, _at_least_size("choose_recomputed"))


def divide_stages(program: Program) -> Program:
    """`cut_stages`, by what becomes of each division; the program of the division that is taken
    remembers it for the passes to come.
    """
    return cut_stages(evolve(program, after="divide_stages"), _lower_and_remember)


def _lower_and_remember(program: Program, until: str) -> Program:
    """The program after the pass `until`; each on the way remembers the next, until it is asked
    for.
    """
    for step in _steps(program, until):
        lowered = _after(step, program)
        program.known[step] = lowered
        program = lowered
    return program


def fuse_buckets(program: Program) -> Program:
    """Buckets of the size that the plan says or `choose_bucket` finds."""
    return bucket_params.fuse_buckets(choose_bucket(program))


PASSES: tuple[Pass, ...] = (
    validate,
    choose_strategies,
    divide_stages,
    factor_axes,
    flatten_sums,
    propagate,
    choose_layout,
    insert_collectives,
    fuse_ops,
    overlap_exchanges,
    choose_recomputed,
    differentiate,
    place_state,
    place_stages,
    fuse_buckets,
    schedule_pipeline,
)

PASS_NAMES = ("resolve", *(step.__name__ for step in PASSES))

NEW_FORM = ("propagate", "insert_collectives", "differentiate")
"""The check asks for another form after these passes than before them, and so always looks at
what they make.
"""


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
    last, mistakes = program, Diagnostics()
    try:
        for lowered in lower_unchecked(program, until):
            # a pass that changes nothing but `after` needs no second check
            if lowered.after in NEW_FORM or lowered != evolve(last, after=lowered.after):
                check(lowered)
            seen(lowered)
            last = lowered
    except PlanError as error:
        mistakes.add(error)
    raise_mistakes(last, mistakes)
    return last


def lower_unchecked(program: Program, until: str = PASS_NAMES[-1]) -> Iterator[Program]:
    """The program after each pass up to `until`, unchecked.  Raises PlanError."""
    for step in _steps(program, until):
        program = _after(step, program)
        yield program


def _steps(program: Program, until: str) -> tuple[Pass, ...]:
    """The passes that a program has not been through, up to `until`."""
    return PASSES[PASS_NAMES.index(program.after) : PASS_NAMES.index(until)]


def _after(step: Pass, program: Program) -> Program:
    """The program after its next pass, which it may remember."""
    remembered = program.known.pop(step, None)
    if isinstance(remembered, Program):
        return remembered
    lowered = step(program)
    if lowered.after == step.__name__:
        return lowered
    return evolve(lowered, after=step.__name__)


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
