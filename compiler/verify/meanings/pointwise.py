"""Functions of one operand, elementwise."""

from ..tensors import Tensor
from .call import Call, Meaning


def _silu(c: Call) -> list[Tensor]:
    return [c.numbers.function("silu", c.args[0])]


def _slope(c: Call, dy: Tensor, x: Tensor) -> Tensor:
    return c.numbers.product(x.dims, dy, c.numbers.function("silu slope", x))


MEANINGS = {
    "silu": Meaning(_silu, lambda c, grads: [_slope(c, grads[0], c.args[0])]),
    "silu_dx": Meaning(lambda c: [_slope(c, *c.args)]),
}
