"""Sums and products, elementwise functions, look-ups, and sums, means and softmax over named
dims.
"""

from math import prod

from ...ops import OPS
from ...ops.pointwise import FUNCTIONS
from ..tensors import Dims, Tensor
from .call import Call, Semantics


def _product(c: Call) -> list[Tensor]:
    return [c.numbers.product(c.dims, *c.args)]


def _product_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    x, y = c.args
    return [c.numbers.product(x.dims, grads[0], y), c.numbers.product(y.dims, grads[0], x)]


def _scale(c: Call, x: Tensor) -> Tensor:
    return c.numbers.product(x.dims, x, c.ratio("by"))


def _over(c: Call, y: Tensor) -> Tensor:
    """1 / y as a function like any other: y may contain quotients, which the bound does not
    allow in an inverse.
    """
    return c.numbers.function("reciprocal", y)


def _quotient_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    n, (x, y) = c.numbers, c.args
    over = _over(c, y)
    return [
        n.product(x.dims, grads[0], over),
        n.negative(n.product(y.dims, grads[0], x, over, over)),
    ]


# ---- elementwise functions


def _apply(c: Call, word: str) -> Tensor:
    """A function of the operand with the op's attributes, in the order of their declaration."""
    constants = tuple(c.get(attribute.name) for attribute in OPS[c.op.kind].attributes)
    return c.numbers.function(word, c.args[0], constants=constants)


def _function(name: str) -> Semantics:
    return Semantics(
        lambda c: [_apply(c, name)],
        lambda c, grads: [c.numbers.product(c.args[0].dims, grads[0], _apply(c, f"{name} slope"))],
    )


# ---- look-ups, as products with one-hot ids: an id whose row another rank holds counts zero


def _embedding(c: Call, dims: Dims, factor: Tensor) -> Tensor:
    return c.numbers.product(dims, c.hot(0, 1, c.args[1].dims[0]), factor)


# ---- over named dims


def sizes(c: Call, dims: Dims) -> Tensor:
    """One part in as many as some dims have together, on all ranks."""
    return c.numbers.ratio(1, prod(c.world.dims[dim] for dim in dims))


def _sum_dx(c: Call, dy: Tensor) -> Tensor:
    """dy for each element of x."""
    (x,) = c.args
    return c.numbers.total(x.dims, dy, c.numbers.product(x.dims, x, c.numbers.ratio(0, 1)))


def _mean_dx(c: Call, dy: Tensor) -> Tensor:
    over = tuple(dim for dim in c.args[0].dims if dim not in dy.dims)
    return _sum_dx(c, c.numbers.product(dy.dims, dy, sizes(c, over)))


def _softmax(c: Call) -> list[Tensor]:
    (x,) = c.args
    dims = (*_rest(c, x), *c.op.names("over"))
    weights = c.numbers.softmax(Tensor(dims, x.onto(dims), x.degree))
    return [Tensor(x.dims, weights.onto(x.dims), weights.degree)]


def _softmax_dx(c: Call, dy: Tensor, y: Tensor) -> Tensor:
    """y · (dy − Σ dy · y)"""
    n = c.numbers
    return n.product(y.dims, y, n.total(y.dims, dy, n.negative(n.product(_rest(c, y), dy, y))))


def _rest(c: Call, x: Tensor) -> Dims:
    """The dims that the op does not go over."""
    return tuple(dim for dim in x.dims if dim not in c.op.names("over"))


MEANINGS = {
    "div": Semantics(
        lambda c: [c.numbers.product(c.dims, c.args[0], _over(c, c.args[1]))], _quotient_gradients
    ),
    "scale": Semantics(lambda c: [_scale(c, c.args[0])], lambda c, grads: [_scale(c, grads[0])]),
    "shift": Semantics(
        lambda c: [c.numbers.total(c.dims, *c.args, c.ratio("by"))], lambda c, grads: [grads[0]]
    ),
    "add": Semantics(
        lambda c: [c.numbers.total(c.dims, *c.args)],
        lambda c, grads: [c.numbers.product(x.dims, grads[0]) for x in c.args],
    ),
    "mul": Semantics(_product, _product_gradients),
    "contract": Semantics(_product, _product_gradients),
    "embedding": Semantics(
        lambda c: [_embedding(c, c.dims, c.args[1])],
        lambda c, grads: [None, _embedding(c, c.args[1].dims, grads[0])],
    ),
    "sum": Semantics(_product, lambda c, grads: [_sum_dx(c, grads[0])]),
    "mean": Semantics(
        lambda c: [c.numbers.product(c.dims, c.args[0], sizes(c, c.op.names("over")))],
        lambda c, grads: [_mean_dx(c, grads[0])],
    ),
    "softmax": Semantics(_softmax, lambda c, grads: [_softmax_dx(c, grads[0], c.results[0])]),
    **{entry.name: _function(entry.name) for entry in FUNCTIONS},
}
