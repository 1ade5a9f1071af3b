"""Sums and products, elementwise functions, look-ups, and sums, means and softmax over named
dims.
"""

from math import prod

from ...ops import OPS
from ...ops.pointwise import FUNCTIONS
from ..tape import softmax_gradient
from ..tensors import Dims, Tensor
from .call import Call, Semantics


def _product(c: Call) -> list[Tensor]:
    return [c.numbers.product(c.dims, *c.args)]


def _quotient(c: Call) -> list[Tensor]:
    """x / y: 1 / y is a function like any other, since y may contain quotients, which the bound
    does not allow in an inverse.
    """
    x, y = c.args
    return [c.numbers.product(c.dims, x, c.numbers.function("reciprocal", y))]


# ---- elementwise functions


def _function(c: Call) -> list[Tensor]:
    """The function of the op's name, with its attributes in the order of their declaration."""
    constants = tuple(c.get(attribute.name) for attribute in OPS[c.op.kind].attributes)
    return [c.numbers.function(c.op.kind, c.args[0], constants=constants)]


# ---- look-ups, as products with one-hot ids: an id whose row another rank holds counts zero


def _embedding(c: Call) -> list[Tensor]:
    table = c.args[1]
    return [c.numbers.product(c.dims, c.hot(0, 1, table.dims[0]), table)]


# ---- over named dims


def sizes(c: Call, dims: Dims) -> Tensor:
    """One part in as many as some dims have together, on all ranks."""
    return c.numbers.ratio(1, prod(c.world.dims[dim] for dim in dims))


def _softmax(c: Call) -> list[Tensor]:
    n, (x,), (over,) = c.numbers, c.args, c.op.names("over")
    dims = (*(dim for dim in x.dims if dim != over), over)
    return [n.product(x.dims, n.softmax(n.product(dims, x)))]


def _softmax_dx(c: Call, dy: Tensor, y: Tensor) -> Tensor:
    (over,) = c.op.names("over")
    return softmax_gradient(c.numbers, y, dy, over)


MEANINGS = {
    "div": Semantics(_quotient),
    "scale": Semantics(lambda c: [c.numbers.product(c.dims, c.args[0], c.ratio("by"))]),
    "shift": Semantics(lambda c: [c.numbers.total(c.dims, *c.args, c.ratio("by"))]),
    "add": Semantics(lambda c: [c.numbers.total(c.dims, *c.args)]),
    "mul": Semantics(_product),
    "contract": Semantics(_product),
    "embedding": Semantics(_embedding),
    "sum": Semantics(_product),
    "mean": Semantics(
        lambda c: [c.numbers.product(c.dims, c.args[0], sizes(c, c.op.names("over")))]
    ),
    "softmax": Semantics(_softmax, from_result=_softmax_dx),
    **{entry.name: Semantics(_function) for entry in FUNCTIONS},
}
