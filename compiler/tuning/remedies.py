"""Changes that would make a plan fit its GPU, each compiled and counted.

For each kind of change (recomputation, microbatches, sharded state, stages), the remedy is the
mildest change that is enough, or else the change that leaves least.  Where no change is enough,
the best change is tried with others on top of it.
"""

from collections.abc import Iterator
from math import inf

from attrs import frozen

from ..analysis.memory import account, capacity
from ..analysis.memory import too_large as warning
from ..config.gpus import GIB
from ..config.settings import AUTO
from ..ir import Program
from ..syntax.diagnostics import Diagnostic
from ..syntax.source import Source, is_ir
from .changes import (
    make_changed_variant,
    more_recomputation,
    more_sharding,
    more_stages,
    smaller_microbatches,
)
from .lowering import make_variant
from .variant import Change

ELSE = "shard parameters over more ranks, as `vocab, heads, ffn over tp` does, or shorten `seq`"

WORTH = 0.98
"""A change is not worth making if a rank still needs more than this part of the memory."""

DEEPEST = 3
"""How many changes are made together."""


def too_large(program: Program, model: Program, source: Source) -> Diagnostic | None:
    """The warning that a plan does not fit its GPU, with changes that would help.

    `model` is the program before any placement.  An elastic plan is taken at its least size, where
    a rank needs most.
    """
    variant = make_variant(program)
    if variant.fits is not False:
        return None
    help = ELSE
    if not is_ir(source.text):
        unchanged = _Remedy((), model, variant.memory.needs, fits=False)
        help = _help(unchanged, _bound(program), source)
    return warning(variant.least, variant.memory, help)


@frozen
class _Remedy:
    """Changes of a plan, the program before any placement, and the bytes that a rank needs then."""

    changes: tuple[Change, ...]
    model: Program
    needs: float
    fits: bool

    def __str__(self) -> str:
        changes = " with ".join(f"`{change}`" for change in self.changes)
        verdict = ", which fits" if self.fits else ""
        return f"{changes} needs {self.needs / GIB:,.1f} GiB{verdict}"

    def with_change(self, change: Change, source: Source) -> "_Remedy | None":
        """This one and a change more; None where that makes no plan."""
        variant = make_changed_variant(source, (*self.changes, change))
        if variant is None:
            return None
        needs, fits = variant.memory.needs, bool(variant.fits)
        return _Remedy(variant.changes, variant.program, needs, fits)


def _help(unchanged: _Remedy, bound: Change | None, source: Source) -> str:
    """Each kind of change by itself, the best first; if none is enough, the best with more on
    top.
    """
    together = unchanged
    if bound:
        remedy = unchanged.with_change(bound, source)
        if remedy:
            return str(remedy)
        together = _Remedy((bound,), unchanged.model, inf, fits=False)
    remedies = alone = _best(together, source)
    while remedies:
        together = remedies[0]
        enough = together.fits or len(together.changes) == DEEPEST
        remedies = [] if enough else _best(together, source)
    lines = [str(remedy) for remedy in (*alone, together)] if alone else []
    return "\n".join(dict.fromkeys(lines if together.fits else [*lines, ELSE]))


def _best(current: _Remedy, source: Source) -> list[_Remedy]:
    """The best of each kind of change, best first; more stages, whose rows take long, if
    nothing else is enough.
    """
    model = current.model
    remedies = list[_Remedy]()
    for changes in (
        more_recomputation(model),
        smaller_microbatches(model),
        more_sharding(model),
    ):
        remedies += _mildest(current, changes, source)
    if not any(remedy.fits for remedy in remedies):
        remedies += _mildest(current, more_stages(model), source)
    return sorted(remedies, key=lambda remedy: remedy.needs)


def _mildest(current: _Remedy, changes: Iterator[Change], source: Source) -> list[_Remedy]:
    """The first change that is enough, or else the change that leaves least; an empty list where
    no change is worth making.
    """
    tried: list[_Remedy] = []
    for change in changes:
        remedy = current.with_change(change, source)
        if remedy and remedy.needs < WORTH * current.needs:
            tried.append(remedy)
            if remedy.fits:
                return [remedy]
    return [min(tried, key=lambda remedy: remedy.needs)] if tried else []


def _bound(program: Program) -> Change | None:
    """The setting that keeps rows of a pipeline within the GPU's memory, where the compiler makes
    them: without it, the compiler makes the fastest rows.

    The compiler sees early, before it looks for rows, that a plan can have no such rows.
    """
    pipeline, room = program.pipeline, capacity(program)
    if not pipeline or pipeline.settings.schedule.kind != AUTO or room is None:
        return None
    chunks = pipeline.settings.schedule.chunks
    prefix = f"chunks={chunks}, " if chunks else ""
    most = (room - account(program).reserve) // GIB
    return Change("pipeline", f"schedule = auto({prefix}memory={most}GiB)")
