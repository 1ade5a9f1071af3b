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
    pulled = VJPS.take_apart(c.op, c.types)
    read = dict(zip(pulled.read, c.args[pulled.grads :], strict=False))
    args = list[Tensor]()
    for i, type in enumerate(pulled.types):
        args.append(read[i] if i in read else c.zero(type))
    results = c.args[pulled.grads + len(pulled.read) :]
    gradients = MEANINGS[pulled.op.kind].gradients
    assert gradients, f"verify: {pulled.op.kind} has no gradients"
    call = Call(c.program, c.world, c.numbers, pulled.op, args, pulled.types, results, pulled.wrt)
    grads = gradients(call, [*c.args[: pulled.grads]])
    return [grad for i in pulled.wrt if (grad := grads[i])]


_FAMILIES = algebra, attention, dropout, experts, fused, join, loss, norm, step, user


def _meanings() -> dict[str, Semantics]:
    meanings: dict[str, Semantics] = {}
    for family in _FAMILIES:
        meanings |= family.MEANINGS
    meanings["vjp"] = Semantics(_vjp)
    return meanings


MEANINGS = _meanings()
"""By the op's kind."""

__all__ = ["MEANINGS", "Call", "Semantics"]
