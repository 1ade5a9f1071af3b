"""The semantics of every op of the IR, as formulas in an arithmetic that is either exact or
float64.

Purpose: the only thing the evaluator knows of ops; shared with nothing that compiles, emits or
runs.  Tests hold each formula and each gradient against autograd.
"""

from ...ops import VJPS
from ..tensors import Tensor
from . import algebra, attention, dropout, experts, fused, join, loss, norm, step, user
from .call import Call, Semantics


def _vjp(c: Call) -> list[Tensor]:
    """Gradients by the semantics of the op whose vjp it is; operands that it is not given count
    zero.
    """
    it = VJPS.pulled(c.op, c.types)
    given = dict(zip(it.read, c.args[it.grads :], strict=False))
    args = [given[i] if i in given else c.zero(type) for i, type in enumerate(it.types)]
    results = c.args[it.grads + len(it.read) :]
    gradients = MEANINGS[it.op.kind].gradients
    assert gradients, f"verify: {it.op.kind} has no gradients"
    call = Call(c.program, c.world, c.numbers, it.op, args, it.types, results, it.wrt)
    found = gradients(call, [*c.args[: it.grads]])
    return [grad for i in it.wrt if (grad := found[i])]


_FAMILIES = algebra, attention, dropout, experts, fused, join, loss, norm, step, user
MEANINGS = {kind: entry for family in _FAMILIES for kind, entry in family.MEANINGS.items()} | {
    "vjp": Semantics(_vjp)
}
"""By the op's kind."""

__all__ = ["MEANINGS", "Call", "Semantics"]
