"""Queries and keys turned by the same angles: in one pass."""

from ...ir import Op, Stmt
from ...ops.attention import ATTENTION, ROPE, ROPE_PAIR
from .context import Known, replaced


def ropes(body: tuple[Stmt, ...], known: Known) -> tuple[Stmt, ...]:
    """Fuses the rotations of an attention's queries and keys."""
    turned = {op.outputs[0].name: (i, op) for i, op in known.ops(body, ROPE.name)}
    by: dict[int, Op | None] = {}
    for op in (stmt for stmt in body if isinstance(stmt, Op) and stmt.kind == ATTENTION.name):
        pair = [turned[name] for name in op.inputs[:2] if name in turned]
        if len(pair) == 2 and len({each.attrs for _, each in pair}) == 1 and pair[0] != pair[1]:
            (first, q), (second, k) = sorted(pair, key=lambda each: each[0])
            if known.uses[q.outputs[0].name] == 1 and second not in by:  # it moves after other uses, or is paired
                inputs, outputs = (*q.inputs, *k.inputs), (*q.outputs, *k.outputs)
                by |= {first: None, second: Op(ROPE_PAIR.name, inputs, outputs, q.attrs, span=q.span)}
    return replaced(body, by)
