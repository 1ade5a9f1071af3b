"""Sums, means and softmax over named dims."""

from math import prod

from ..tensors import Dims, Tensor
from .call import Call, Semantics


def sizes(c: Call, dims: Dims) -> Tensor:
    """One part in as many as some dims have together, on all ranks."""
    return c.numbers.ratio(1, prod(c.world.dims[dim] for dim in dims))


def _sum(c: Call) -> list[Tensor]:
    return [c.numbers.product(c.dims, c.args[0])]


def _mean(c: Call) -> list[Tensor]:
    return [c.numbers.product(c.dims, c.args[0], sizes(c, c.op.names("over")))]


def _sum_dx(c: Call, dy: Tensor, x: Tensor) -> Tensor:
    """dy for each element of x."""
    return c.numbers.total(x.dims, dy, c.numbers.product(x.dims, x, c.numbers.ratio(0, 1)))


def _mean_dx(c: Call, dy: Tensor, x: Tensor) -> Tensor:
    over = tuple(dim for dim in x.dims if dim not in dy.dims)
    return _sum_dx(c, c.numbers.product(dy.dims, dy, sizes(c, over)), x)


def _softmax(c: Call, x: Tensor) -> Tensor:
    dims = (*_rest(c, x), *c.op.names("over"))
    weights = c.numbers.softmax(Tensor(dims, x.onto(dims), x.degree))
    return Tensor(x.dims, weights.onto(x.dims), weights.degree)


def _softmax_dx(c: Call, dy: Tensor, y: Tensor) -> Tensor:
    """y · (dy − Σ dy · y)"""
    n = c.numbers
    return n.product(y.dims, y, n.total(y.dims, dy, n.negative(n.product(_rest(c, y), dy, y))))


def _rest(c: Call, x: Tensor) -> Dims:
    """The dims that the op does not go over."""
    return tuple(dim for dim in x.dims if dim not in c.op.names("over"))


MEANINGS = {
    "sum": Semantics(_sum, lambda c, grads: [_sum_dx(c, grads[0], c.args[0])]),
    "mean": Semantics(_mean, lambda c, grads: [_mean_dx(c, grads[0], c.args[0])]),
    "softmax": Semantics(lambda c: [_softmax(c, c.args[0])], lambda c, grads: [_softmax_dx(c, grads[0], c.results[0])]),
}
