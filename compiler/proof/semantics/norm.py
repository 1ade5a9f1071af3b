"""Normalisation: y = x · w · r, r = (mean(x²) + eps)^(-1/2) over the weight's dims; whole, and in
two parts.
Layernorm first centres x; the variance is then the mean of its squares.
"""

from attrs import evolve

from ..tensors import Dims, Tensor
from .algebra import sizes
from .call import Call, Semantics


def _without(x: Tensor, over: Dims) -> Dims:
    return tuple(dim for dim in x.dims if dim not in over)


def _mean(c: Call, over: Dims, x: Tensor, *factors: Tensor) -> Tensor:
    """The mean of a product over some dims; over a sharded one, a rank's part of it."""
    return c.numbers.product(_without(x, over), x, *factors, sizes(c, over))


def _center(c: Call, x: Tensor, over: Dims) -> Tensor:
    """x less its mean; its gradient has the same form."""
    return c.numbers.total(x.dims, x, c.numbers.negative(_mean(c, over, x)))


# ---- in parts


def _root(c: Call, square: Tensor) -> Tensor:
    return c.numbers.function("inverse root", square, constants=(c.get("eps"),))


def _scale(c: Call, x: Tensor, weight: Tensor, square: Tensor) -> Tensor:
    return c.numbers.product(x.dims, x, weight, _root(c, square))


def _scale_dw(c: Call, dy: Tensor, weight: Tensor, x: Tensor, square: Tensor) -> Tensor:
    return c.numbers.product(weight.dims, dy, x, _root(c, square))


def _scale_dsquare(c: Call, dy: Tensor, weight: Tensor, x: Tensor, square: Tensor) -> Tensor:
    slope = c.numbers.function("inverse root slope", square, constants=(c.get("eps"),))
    return c.numbers.product(square.dims, dy, weight, x, slope)


def _scale_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    (dy,), (x, weight, square) = grads, c.args
    back = (dy, weight, x, square)
    dx = _scale(c, dy, weight, square) if c.wants(0) else None
    dw = _scale_dw(c, *back) if c.wants(1) else None
    dsquare = _scale_dsquare(c, *back) if c.wants(2) else None
    return [dx, dw, dsquare]


def _mean_square_dx(c: Call, dy: Tensor, x: Tensor) -> Tensor:
    return c.numbers.product(x.dims, x, dy, sizes(c, _without(x, dy.dims)), c.numbers.ratio(2, 1))


# ---- whole


def _rms(c: Call, x: Tensor, weight: Tensor) -> Tensor:
    return _scale(c, x, weight, _mean(c, weight.dims, x, x))


def _rms_dx(c: Call, dy: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """Directly, and through the mean of squares."""
    square = _mean(c, weight.dims, x, x)
    through = _mean_square_dx(c, _scale_dsquare(c, dy, weight, x, square), x)
    return c.numbers.total(x.dims, _scale(c, dy, weight, square), through)


def _rms_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    (x, weight), (dy,) = c.args, grads
    dx = _rms_dx(c, dy, weight, x) if c.wants(0) else None
    dw = None
    if c.wants(1):
        dw = _scale_dw(c, dy, weight, x, _mean(c, weight.dims, x, x))
    return [dx, dw]


def _layer(c: Call, x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
    return c.numbers.total(x.dims, _rms(c, _center(c, x, weight.dims), weight), *bias)


def _layer_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    (dy,), (x, weight, *bias) = grads, c.args
    dx, dw = _rms_gradients(evolve(c, args=[_center(c, x, weight.dims), weight]), grads)
    if dx:
        dx = _center(c, dx, weight.dims)
    return [dx, dw, *(c.numbers.product(b.dims, dy) for b in bias)]


MEANINGS = {
    "rmsnorm": Semantics(lambda c: [_rms(c, *c.args)], _rms_gradients),
    "layernorm": Semantics(lambda c: [_layer(c, *c.args)], _layer_gradients),
    "mean_square": Semantics(
        lambda c: [_mean(c, c.op.names("over"), c.args[0], c.args[0])],
        lambda c, grads: [_mean_square_dx(c, grads[0], c.args[0])],
    ),
    "rms_scaled": Semantics(lambda c: [_scale(c, *c.args)], _scale_gradients),
}
