"""Sums and products."""

from ..tensors import Dims, Numbers, Tensor
from .call import Call, Semantics


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


def _by(c: Call) -> Tensor:
    """The op's number, exactly."""
    return c.numbers.ratio(*float(str(c.get("by"))).as_integer_ratio())


def _scaled(c: Call, x: Tensor) -> Tensor:
    return c.numbers.product(x.dims, x, _by(c))


def _over(c: Call, y: Tensor) -> Tensor:
    """1 / y as a function like any other: y may contain quotients, which the bound does not allow in an inverse."""
    return c.numbers.function("reciprocal", y)


def _quotient(c: Call) -> list[Tensor]:
    x, y = c.args
    return [c.numbers.product(c.dims, x, _over(c, y))]


def _quotient_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    n, (x, y) = c.numbers, c.args
    over = _over(c, y)
    return [n.product(x.dims, grads[0], over), n.negative(n.product(y.dims, grads[0], x, over, over))]


MEANINGS = {
    "div": Semantics(_quotient, _quotient_gradients),
    "scale": Semantics(lambda c: [_scaled(c, c.args[0])], lambda c, grads: [_scaled(c, grads[0])]),
    "shift": Semantics(lambda c: [c.numbers.total(c.dims, c.args[0], _by(c))], lambda c, grads: [grads[0]]),
    "add": Semantics(_add, _add_gradients),
    "mul": Semantics(_product, _product_gradients),
    "contract": Semantics(_product, _product_gradients),
}
