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


def _meanings(name: str) -> dict[str, Semantics]:
    """The function and the op of its gradient; both have the same attributes."""

    def back(c: Call, dy: Tensor, x: Tensor) -> Tensor:
        return c.numbers.product(x.dims, dy, slope(c, name, x))

    return {
        name: Semantics(lambda c: [applied(c, name, c.args[0])], lambda c, grads: [back(c, grads[0], c.args[0])]),
        f"{name}_dx": Semantics(lambda c: [back(c, *c.args)]),
    }


MEANINGS = {kind: meaning for entry in FUNCTIONS for kind, meaning in _meanings(entry.name).items()}
