"""x·w₁, x·w₂, …: one product with weights that are adjacent in memory, as for queries, keys and values.

Purpose: only those weights are joined that can be adjacent, however state is sharded: they share a bucket, and a group
of the optimizer's settings.  Non-goals: laying them out (`passes.bucket_params`).
"""

from collections.abc import Sequence

from attrs import evolve

from ...analysis.bucket_layout import stored_as_matrix
from ...ir import Op, Param, Stmt
from ...ops.fused import CONTRACTS
from ...ops.rope import ROPE
from .context import Known, replaced


def products(body: tuple[Stmt, ...], known: Known) -> tuple[Stmt, ...]:
    """Fuses products of one value with parameters that nothing else reads, over the same dims and stored alike."""
    alike: dict[object, list[tuple[int, Op]]] = {}
    for at, op in known.ops(body, "contract"):
        x, weight = op.inputs
        if (param := known.parameters.get(weight)) and x not in known.parameters and _is_free(param, op, known):
            alike.setdefault((x, op.attrs, _kept(param, known)), []).append((at, op))
    by: dict[int, Op | None] = {}
    for several in alike.values():
        if len(several) > 1:
            by |= dict.fromkeys((at for at, _ in several), None)
            by[several[0][0]] = _together([op for _, op in several], _turned(body))
    return replaced(body, by)


def _is_free(param: Param, op: Op, known: Known) -> bool:
    """Whether a weight is stored as the matrix that a product takes, and nothing else takes it."""
    return stored_as_matrix(param) and param.inner == len(op.names("over")) and known.readers[param.name] == 1


def _kept(param: Param, known: Known) -> object:
    """The properties that weights of one bucket and one group of settings share: repeats, axes, sharded dims, state."""
    axes = frozenset(axis for axis, place in param.type.places if place.dim)
    state = evolve(known.program.state_of(param.name), of=())
    place = known.program.train.optimizer.place(param.name)
    return len(param.type.dims), param.type.dims[: param.stacked], axes, state, place


def _turned(body: Sequence[Stmt]) -> set[str]:
    """The operands of rope, which are not saved for backward."""
    return {name for stmt in body if isinstance(stmt, Op) and stmt.kind == ROPE.name for name in stmt.inputs}


def _together(several: Sequence[Op], turned: set[str]) -> Op:
    """One op for all; saved results get memory of their own, if others in that memory are not saved."""
    first, weights = several[0], tuple(op.inputs[1] for op in several)
    outputs = tuple(value for op in several for value in op.outputs)
    kept = tuple(str(i) for i, value in enumerate(outputs) if value.name not in turned)
    apart = (("apart", kept),) if 0 < len(kept) < len(outputs) else ()
    return Op(CONTRACTS.name, (first.inputs[0], *weights), outputs, (*first.attrs, *apart), span=first.span)
