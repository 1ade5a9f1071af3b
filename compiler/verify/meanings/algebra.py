"""Sums and products."""

from ..numbers import Numbers
from ..tensors import Dims, Tensor
from .call import Call, Meaning


def narrowed(n: Numbers, grad: Tensor, dims: Dims) -> Tensor:
    """The gradient of an operand that was broadcast: summed over the dims it lacks."""
    return n.product(dims, grad)


def _add(c: Call) -> list[Tensor]:
    return [c.numbers.total(c.dims, *c.args)]


def _add_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    return [narrowed(c.numbers, grads[0], x.dims) for x in c.args]


def _product(c: Call) -> list[Tensor]:
    return [c.numbers.product(c.dims, *c.args)]


def _product_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    x, y = c.args
    return [c.numbers.product(x.dims, grads[0], y), c.numbers.product(y.dims, grads[0], x)]


def _sum_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    (x,) = c.args
    return [c.numbers.total(x.dims, grads[0], c.numbers.product(x.dims, x, c.numbers.ratio(0, 1)))]


MEANINGS = {
    "add": Meaning(_add, _add_gradients),
    "mul": Meaning(_product, _product_gradients),
    "contract": Meaning(_product, _product_gradients),
    "sum": Meaning(_product, _sum_gradients),
}
