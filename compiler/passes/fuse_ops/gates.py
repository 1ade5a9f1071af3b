"""f(x) · y: one pass over x and y, which alone are saved for backward."""

from attrs import evolve

from ...ir import Op, Stmt
from ...ops.fused import GATES
from .context import Known, replaced


def gates(body: tuple[Stmt, ...], known: Known) -> tuple[Stmt, ...]:
    """Fuses functions whose values are used in a product with a value of the same type, and nowhere else."""
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
