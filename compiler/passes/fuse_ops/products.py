"""x·w₁, x·w₂, …: one product with weights that lie one behind the other, as queries, keys and values have them."""

from collections.abc import Sequence

from ...ir import Op, Stmt, Type
from ...ops.fused import CONTRACTS
from .known import Known, replaced


def products(body: tuple[Stmt, ...], known: Known) -> tuple[Stmt, ...]:
    """Fuses products of one value with parameters of as many dims, over the same ones, divided over the same axes."""
    alike: dict[object, list[tuple[int, Op]]] = {}
    for at, op in known.ops(body, "contract"):
        x, weight = op.inputs
        if weight in known.parameters and x not in known.parameters:
            type = known.types[weight]
            alike.setdefault((x, op.attrs, len(type.dims), _axes(type)), []).append((at, op))
    by: dict[int, Op | None] = {}
    for several in alike.values():
        if len(several) > 1 and len({op.inputs[1] for _, op in several}) == len(several):
            by |= dict.fromkeys((at for at, _ in several), None)
            by[several[0][0]] = _together([op for _, op in several], _turned(body))
    return replaced(body, by)


def _axes(weight: Type) -> frozenset[str]:
    """Over which axes a weight is divided, whatever dim that is."""
    return frozenset(axis for axis, place in weight.places if place.dim)


def _turned(body: Sequence[Stmt]) -> set[str]:
    """What rope takes, and nothing keeps for backward."""
    return {name for stmt in body if isinstance(stmt, Op) and stmt.kind == "rope" for name in stmt.inputs}


def _together(several: Sequence[Op], turned: set[str]) -> Op:
    """One op for all; what backward keeps gets memory of its own, if others in that memory are not kept."""
    first, weights = several[0], tuple(op.inputs[1] for op in several)
    outputs = tuple(value for op in several for value in op.outputs)
    kept = tuple(str(i) for i, value in enumerate(outputs) if value.name not in turned)
    apart = (("apart", kept),) if 0 < len(kept) < len(outputs) else ()
    return Op(CONTRACTS.name, (first.inputs[0], *weights), outputs, (*first.attrs, *apart), span=first.span)
