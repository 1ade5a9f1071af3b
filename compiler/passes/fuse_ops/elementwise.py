"""Ops that kernels do in one pass over memory: gates, sums with their norms, rotations of queries and keys."""

from attrs import evolve

from ...ir import Op, Stmt
from ...ops.attention import ATTENTION
from ...ops.fused import GATES, NORMS
from ...ops.rope import ROPE, ROPE_PAIR
from .context import Known, replaced


def gates(body: tuple[Stmt, ...], known: Known) -> tuple[Stmt, ...]:
    """f(x) · y: fuses functions whose values are used in a product with a value of the same type, and nowhere else."""
    opened = {op.outputs[0].name: (i, op) for i, op in known.ops(body, *GATES)}
    by: dict[int, Op | None] = {}
    for at, op in known.ops(body, "mul"):
        name = next((n for n in op.inputs if n in opened and known.uses[n] == 1), "")
        if name and len({known.types[n] for n in op.inputs}) == 1:
            first, function = opened[name]
            (other,) = (n for n in op.inputs if n != name)
            if other not in function.inputs:
                inputs = (*function.inputs, other)
                by |= {first: None, at: evolve(op, kind=GATES[function.kind], inputs=inputs, attrs=function.attrs)}
    return replaced(body, by)


def norms(body: tuple[Stmt, ...], known: Known) -> tuple[Stmt, ...]:
    """x + y and its norm: fuses sums of two values with the first norm of each, where the sum is used besides."""
    added = {op.outputs[0].name: (i, op) for i, op in known.ops(body, "add")}
    by: dict[int, Op | None] = {}
    for at, op in known.ops(body, *NORMS):
        total, *weights = op.inputs
        first, add = added.pop(total, (0, None))
        if add and known.uses[total] > 1 and _two_alike(add, known) and known.parameters.keys() >= {*weights}:
            outputs = (*add.outputs, *op.outputs)
            by |= {at: None, first: evolve(op, kind=NORMS[op.kind], inputs=(*add.inputs, *weights), outputs=outputs)}
    return replaced(body, by)


def _two_alike(add: Op, known: Known) -> bool:
    """Whether two values of one type are added."""
    return len(add.inputs) == 2 and len({known.types[name] for name in (*add.inputs, add.outputs[0].name)}) == 1


def ropes(body: tuple[Stmt, ...], known: Known) -> tuple[Stmt, ...]:
    """Fuses the rotations of an attention's queries and keys, by the same angles."""
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
