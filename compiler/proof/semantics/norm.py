"""Normalisation: y = x · w · r, r = (mean(x²) + eps)^(-1/2) over the weight's dims; whole, and in
two parts.
Layernorm first centres x; the variance is then the mean of its squares.
"""

from ..tensors import Dims, Tensor
from .algebra import sizes
from .call import Call, Semantics


def _without(x: Tensor, over: Dims) -> Dims:
    return tuple(dim for dim in x.dims if dim not in over)


def _mean(c: Call, over: Dims, x: Tensor, *factors: Tensor) -> Tensor:
    """The mean of a product over some dims; over a sharded one, a rank's part of it."""
    return c.numbers.product(_without(x, over), x, *factors, sizes(c, over))


def _center(c: Call, x: Tensor, over: Dims) -> Tensor:
    """x less its mean."""
    return c.numbers.total(x.dims, x, c.numbers.negative(_mean(c, over, x)))


# ---- in parts


def _root(c: Call, square: Tensor) -> Tensor:
    return c.numbers.function("inverse root", square, constants=(c.get("eps"),))


def _scale(c: Call, x: Tensor, weight: Tensor, square: Tensor) -> Tensor:
    return c.numbers.product(x.dims, x, weight, _root(c, square))


# ---- whole


def _rms(c: Call, x: Tensor, weight: Tensor) -> Tensor:
    return _scale(c, x, weight, _mean(c, weight.dims, x, x))


def _layer(c: Call, x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
    return c.numbers.total(x.dims, _rms(c, _center(c, x, weight.dims), weight), *bias)


MEANINGS = {
    "rmsnorm": Semantics(lambda c: [_rms(c, *c.args)]),
    "layernorm": Semantics(lambda c: [_layer(c, *c.args)]),
    "mean_square": Semantics(lambda c: [_mean(c, c.op.names("over"), c.args[0], c.args[0])]),
    "rms_scaled": Semantics(lambda c: [_scale(c, *c.args)]),
}
