"""Normalisation: y = x · w · r, r = (mean(x²) + eps)^(-1/2) over the weight's dims."""

from math import prod

from ..tensors import Dims, Tensor
from .call import Call, Meaning


def _mean(c: Call, x: Tensor, y: Tensor, over: Dims) -> Tensor:
    """The mean of x · y over some dims, each of which a rank holds whole."""
    rest = tuple(dim for dim in x.dims if dim not in over)
    size = prod(c.world.dims[dim] for dim in over)
    return c.numbers.product(rest, x, y, c.numbers.ratio(1, size))


def _inverse(c: Call, x: Tensor, weight: Tensor, name: str = "inverse root") -> Tensor:
    return c.numbers.function(name, _mean(c, x, x, weight.dims), constants=(c.get("eps"),))


def _rmsnorm(c: Call) -> list[Tensor]:
    x, weight = c.args
    return [c.numbers.product(x.dims, x, _inverse(c, x, weight), weight)]


def _dx(c: Call, dy: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """dx = r · g + 2 · r'(mean x²) · x · mean(g · x), with g = dy · w."""
    n = c.numbers
    g = n.product(x.dims, dy, weight)
    slope = n.product((), n.ratio(2, 1))
    turned = n.product(x.dims, x, _inverse(c, x, weight, "inverse root slope"), _mean(c, g, x, weight.dims), slope)
    return n.total(x.dims, n.product(x.dims, g, _inverse(c, x, weight)), turned)


def _dw(c: Call, dy: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    return c.numbers.product(weight.dims, dy, x, _inverse(c, x, weight))


def _gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    x, weight = c.args
    return [_dx(c, grads[0], weight, x), _dw(c, grads[0], weight, x)]


MEANINGS = {
    "rmsnorm": Meaning(_rmsnorm, _gradients),
    "rmsnorm_dx": Meaning(lambda c: [_dx(c, *c.args)]),
    "rmsnorm_dw": Meaning(lambda c: [_dw(c, *c.args)]),
}
