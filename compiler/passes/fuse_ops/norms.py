"""x + y and its norm: the sum is written and read once."""

from attrs import evolve

from ...ir import Op, Stmt
from ...ops.fused import NORMS
from .context import Known, replaced


def norms(body: tuple[Stmt, ...], known: Known) -> tuple[Stmt, ...]:
    """Fuses sums of two values with the first norm of each, where the sum is used besides."""
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
