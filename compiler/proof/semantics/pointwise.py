"""Functions of one operand, elementwise: a function of that name, and its slope."""

from ...ops import OPS
from ...ops.pointwise import FUNCTIONS
from ..tensors import Tensor
from .call import Call, Semantics


def _applied(c: Call, word: str) -> Tensor:
    """A function of the operand with the op's attributes, in the order in which the op declares them."""
    return c.numbers.function(word, c.args[0], constants=tuple(c.get(a.name) for a in OPS[c.op.kind].attributes))


def _meaning(name: str) -> Semantics:
    return Semantics(
        lambda c: [_applied(c, name)],
        lambda c, grads: [c.numbers.product(c.args[0].dims, grads[0], _applied(c, f"{name} slope"))],
    )


MEANINGS = {entry.name: _meaning(entry.name) for entry in FUNCTIONS}
