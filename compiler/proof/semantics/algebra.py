"""Sums and products, elementwise functions, look-ups, dropout, and sums, means and softmax over named dims."""

from collections.abc import Sequence
from math import prod

import numpy as np

from ...ops import OPS
from ...ops.pointwise import FUNCTIONS
from ..tensors import Array, Dims, Tensor
from .call import Call, Semantics


def _product(c: Call) -> list[Tensor]:
    return [c.numbers.product(c.dims, *c.args)]


def _product_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    x, y = c.args
    return [c.numbers.product(x.dims, grads[0], y), c.numbers.product(y.dims, grads[0], x)]


def _scaled(c: Call, x: Tensor) -> Tensor:
    return c.numbers.product(x.dims, x, c.ratio("by"))


def _over(c: Call, y: Tensor) -> Tensor:
    """1 / y as a function like any other: y may contain quotients, which the bound does not allow in an inverse."""
    return c.numbers.function("reciprocal", y)


def _quotient_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    n, (x, y) = c.numbers, c.args
    over = _over(c, y)
    return [n.product(x.dims, grads[0], over), n.negative(n.product(y.dims, grads[0], x, over, over))]


# ---- elementwise functions


def _applied(c: Call, word: str) -> Tensor:
    """A function of the operand with the op's attributes, in the order in which the op declares them."""
    return c.numbers.function(word, c.args[0], constants=tuple(c.get(a.name) for a in OPS[c.op.kind].attributes))


def _function(name: str) -> Semantics:
    return Semantics(
        lambda c: [_applied(c, name)],
        lambda c, grads: [c.numbers.product(c.args[0].dims, grads[0], _applied(c, f"{name} slope"))],
    )


# ---- look-ups, as products with one-hot ids: an id whose row another rank holds counts zero


def _embedding(c: Call, dims: Dims, factor: Tensor) -> Tensor:
    return c.numbers.product(dims, c.hot(0, 1, c.args[1].dims[0]), factor)


# ---- dropout, a product with numbers that are a keyed function of the sample's draw, the site and the global index

LAYERS = 1000


def kept(c: Call, draws: Tensor, share: float, places: Sequence[tuple[str, Array]]) -> Tensor:
    """The factors of elements: their dims are those of `draws` and of `places`, each with its global indices.

    In the field these are any numbers: steps that agree for all of them agree for 0 and 1 / (1 − share).
    """
    n = c.numbers
    dims: Dims = (*draws.dims, *(dim for dim, _ in places))
    indices = [draws, *(Tensor((dim,), at) for dim, at in places)]
    operands = [Tensor(dims, n.constant(each.onto(dims), dims).array) for each in indices]
    return n.function("kept", *operands, constants=(c.get("site"), share))


def _dropped(c: Call, x: Tensor) -> Tensor:
    whole, draws = c.args
    places = [(dim, c.indices(0, dim)) for dim in whole.dims if dim not in draws.dims]
    return c.numbers.product(x.dims, x, kept(c, draws, c.number("p"), places))


def _forked(c: Call) -> list[Tensor]:
    """Integers that no other draw nor iteration has: small repeats have fewer layers than `LAYERS`."""
    (draws,) = c.args
    layer = np.arange(c.world.dims[c.dims[0]]).reshape(-1, *(1,) * len(draws.dims))
    return [Tensor(c.dims, (np.expand_dims(draws.array, draws.lead) + 1) * LAYERS + layer)]


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
    "div": Semantics(lambda c: [c.numbers.product(c.dims, c.args[0], _over(c, c.args[1]))], _quotient_gradients),
    "scale": Semantics(lambda c: [_scaled(c, c.args[0])], lambda c, grads: [_scaled(c, grads[0])]),
    "shift": Semantics(lambda c: [c.numbers.total(c.dims, *c.args, c.ratio("by"))], lambda c, grads: [grads[0]]),
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
    "dropout": Semantics(lambda c: [_dropped(c, c.args[0])], lambda c, grads: [_dropped(c, grads[0]), None]),
    "fork": Semantics(_forked, lambda c, grads: [None]),
    "sum": Semantics(_product, lambda c, grads: [_sum_dx(c, grads[0])]),
    "mean": Semantics(
        lambda c: [c.numbers.product(c.dims, c.args[0], sizes(c, c.op.names("over")))],
        lambda c, grads: [_mean_dx(c, grads[0])],
    ),
    "softmax": Semantics(_softmax, lambda c, grads: [_softmax_dx(c, grads[0], c.results[0])]),
    **{entry.name: _function(entry.name) for entry in FUNCTIONS},
}
