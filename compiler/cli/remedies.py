"""Changes that would make a plan fit its GPU, each compiled and counted.

For each kind of change (recomputation, microbatches, sharded state, stages) the mildest that is
enough, or else the one that leaves least; where none is, the best with others on top of it.
"""

from collections.abc import Iterator
from math import inf

from attrs import evolve, frozen

from ..analysis.memory import account, capacity, fits
from ..analysis.memory import too_large as warning
from ..analysis.recompute import selectable
from ..config.gpus import GIB
from ..config.settings import AUTO, ON
from ..frontend import resolve
from ..ir import BATCH, Program, StateAxes
from ..ops.attention import ROPE
from ..ops.norm import LAYERNORM, RMSNORM
from ..ops.pointwise import FUNCTIONS
from ..passes import passed
from ..syntax.diagnostics import Diagnostic, PlanError
from ..syntax.source import Source, is_ir

CHEAP = {ROPE.name, RMSNORM.name, LAYERNORM.name, *(entry.name for entry in FUNCTIONS)}
"""The ops that backward recomputes in little time."""

ELSE = "shard parameters over more ranks, as `vocab, heads, ffn over tp` does, or shorten `seq`"

Change = tuple[str, str]
"""A section of a plan, and its new content."""

WORTH = 0.98
"""A change that leaves more than this part of what a rank needs is none worth making."""

DEEPEST = 3
"""How many changes are made together."""


def too_large(program: Program, model: Program, source: Source) -> Diagnostic | None:
    """The warning that a plan does not fit its GPU, with what would help; `model` is what its text was resolved to."""
    now = account(program)
    if fits(program, now) is not False:
        return None
    begun = _Remedy((), model, program, now.needs, fits=False)
    return warning(program, now, _help(begun, source))


@frozen
class _Remedy:
    """A plan with some changes: resolved, and compiled; and what a rank of it needs."""

    changes: tuple[Change, ...]
    model: Program
    program: Program
    needs: float
    fits: bool

    def __str__(self) -> str:
        said = " with ".join(f"`{section} {{ {body} }}`" for section, body in self.changes)
        return f"{said} needs {self.needs / GIB:,.1f} GiB{', which fits' if self.fits else ''}"

    def with_change(self, change: Change, source: Source) -> "_Remedy | None":
        """This one and a change more; None where that makes no plan."""
        changes = (*self.changes, change)
        bodies: dict[str, str] = {}
        for section, body in changes:
            bodies[section] = f"{bodies.get(section, '')} {body}"
        text = "\n".join(f"{section} {{{body} }}" for section, body in bodies.items())
        try:
            model = resolve(source, Source("changes", text))
            *_, program = passed(model)
        except PlanError:
            return None
        found = account(program)
        return _Remedy(changes, model, program, found.needs, bool(fits(program, found)))


def _help(now: _Remedy, source: Source) -> str:
    """Each kind of change by itself, the best first; if none is enough, the best with more on top."""
    if is_ir(source.text):
        return ELSE
    if (bound := _bound(now)) and (kept := now.with_change(bound, source)):
        return str(kept)
    together = evolve(now, changes=(bound,), needs=inf) if bound else now
    found = alone = _best(together, source)
    while found:
        together = found[0]
        enough = together.fits or len(together.changes) == DEEPEST
        found = [] if enough else _best(together, source)
    lines = [str(remedy) for remedy in (*alone, together)] if alone else []
    return "\n".join(dict.fromkeys(lines if together.fits else [*lines, ELSE]))


def _best(now: _Remedy, source: Source) -> list[_Remedy]:
    """The best of each kind of change, best first; more stages, whose rows take long, if nothing else is enough."""
    kinds = (_recomputation(now.model), _microbatches(now.model), _shared(now.model))
    found = [remedy for changes in kinds for remedy in _mildest(now, changes, source)]
    if not any(remedy.fits for remedy in found):
        found += _mildest(now, _stages(now.model), source)
    return sorted(found, key=lambda it: it.needs)


def _mildest(now: _Remedy, changes: Iterator[Change], source: Source) -> list[_Remedy]:
    """The first change that is enough, or the one that leaves least; none if none is worth it."""
    tried: list[_Remedy] = []
    for change in changes:
        remedy = now.with_change(change, source)
        if remedy and remedy.needs < WORTH * now.needs:
            tried.append(remedy)
            if remedy.fits:
                return [remedy]
    return [min(tried, key=lambda it: it.needs)] if tried else []


def _bound(now: _Remedy) -> Change | None:
    """Rows that keep to what the GPU has, where the compiler makes them: without that, it takes what makes them fast.

    A plan for which there are no such rows is found to be none before any are looked for.
    """
    pipeline, room = now.model.pipeline, capacity(now.program)
    if not pipeline or pipeline.settings.schedule.kind != AUTO or room is None:
        return None
    chunks = pipeline.settings.schedule.chunks
    most = (room - account(now.program).reserve) // GIB
    return "pipeline", f"schedule = auto({f'chunks={chunks}, ' if chunks else ''}memory={most}GiB)"


def _recomputation(model: Program) -> Iterator[Change]:
    """Recomputation in backward: of ops that cost little, or of layers."""
    recompute = model.train.recompute
    if recompute.word == "none" and model.train.compile != ON:
        names = [name for name in selectable(model) if name in CHEAP]
        yield from [("train", f"recompute = selective({', '.join(names)})")] if names else []
    if recompute.word != "full":
        yield "train", "recompute = full"


def _microbatches(model: Program) -> Iterator[Change]:
    """Half of the sequences at a time, a quarter, and so on."""
    size = model.train.microbatch
    while size % 2 == 0:
        size //= 2
        yield "train", f"microbatch = {size}"


def _shared(model: Program) -> Iterator[Change]:
    """Stages of ZeRO over all axes of data; a pipeline reduces gradients once a step, so it has no second."""
    if len(model.state) > 1:  # groups have rules of their own
        return
    axes = tuple(axis.name for axis in model.axes if axis.name in _data(model))
    now = model.state[0] if model.state else StateAxes()
    rules = {"zero 1": "optimizer", "zero 2": "gradients", "zero 3": "parameters"}
    if model.pipeline:
        rules = {"zero 1": "optimizer", "parameters, optimizer": "parameters"}
    for rule, kind in rules.items():
        if axes and getattr(now, kind) != axes:
            yield "state", f"{rule} over {', '.join(axes)}"


def _stages(model: Program) -> Iterator[Change]:
    """Twice and four times the ranks along a pipeline's axis, of those along an axis of data."""
    pipeline = model.pipeline
    if not pipeline or pipeline.given or pipeline.settings.stages:
        return
    for times in (2, 4):
        data = next((axis for axis in model.axes if axis.name in _data(model) and axis.size > times), None)
        if data and data.size % times == 0:
            sizes = {axis.name: axis.size for axis in model.axes}
            sizes |= {pipeline.axis: sizes[pipeline.axis] * times, data.name: data.size // times}
            yield "mesh", "  ".join(f"{name} = {size}" for name, size in sizes.items())


def _data(model: Program) -> set[str]:
    return {claim.axis for claim in model.claims if claim.dim == BATCH}
