"""Functions of one operand, elementwise: a function of that name, and its slope."""

from ...ops import OPS
from ...ops.pointwise import FUNCTIONS
from ..tensors import Tensor
from .call import Call, Semantics


def applied(c: Call, word: str, x: Tensor) -> Tensor:
    """A function of x with the op's attributes, in the order in which the op declares them."""
    return c.numbers.function(word, x, constants=tuple(c.get(a.name) for a in OPS[c.op.kind].attributes))


def slope(c: Call, name: str, x: Tensor) -> Tensor:
    """The slope of the function `name` at x."""
    return applied(c, f"{name} slope", x)


def _meaning(name: str) -> Semantics:
    def gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
        (x,), (dy,) = c.args, grads
        return [c.numbers.product(x.dims, dy, slope(c, name, x))]

    return Semantics(lambda c: [applied(c, name, c.args[0])], gradients)


MEANINGS = {entry.name: _meaning(entry.name) for entry in FUNCTIONS}
