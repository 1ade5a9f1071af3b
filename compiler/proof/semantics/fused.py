"""Ops that are fused of others: what each of those means, one after the other."""

from attrs import evolve

from ...ops.fused import GATES, NORMS
from ..tensors import Tensor
from . import norm
from .call import Call, Semantics
from .pointwise import applied, slope

# ---- a sum and its norm


def _added(norm: Semantics) -> Semantics:
    """x + y and its norm; the gradient of x, which is that of y."""

    def both(c: Call) -> list[Tensor]:
        x, y, *weights = c.args
        total = c.numbers.total(x.dims, x, y)
        return [total, *norm.value(evolve(c, args=[total, *weights]))]

    def gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
        total, (_, _, *weights), (d_sum, d_norm) = c.results[0], c.args, grads
        assert norm.gradients, "verify: a norm without gradients"
        through, *others = norm.gradients(evolve(c, args=[total, *weights]), [d_norm])
        each = c.numbers.total(total.dims, d_sum, *([through] if through else []))
        return [each, each, *others]

    return Semantics(both, gradients)


# ---- several products of one value


def _products(c: Call) -> list[Tensor]:
    x, *weights = c.args
    return [c.numbers.product(value.type.dims, x, w) for value, w in zip(c.op.outputs, weights, strict=True)]


def _products_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    x, *weights = c.args
    pairs = [*zip(grads, weights, strict=True)]
    of_x = c.numbers.total(x.dims, *(c.numbers.product(x.dims, grad, w) for grad, w in pairs))
    return [of_x, *(c.numbers.product(w.dims, grad, x) for grad, w in pairs)]


# ---- a gate


def _gated(function: str) -> Semantics:
    """f(x) · y, and the gradients of both."""

    def value(c: Call) -> list[Tensor]:
        x, y = c.args
        return [c.numbers.product(x.dims, applied(c, function, x), y)]

    def gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
        n, (x, y), (dy,) = c.numbers, c.args, grads
        return [n.product(x.dims, dy, y, slope(c, function, x)), n.product(x.dims, dy, applied(c, function, x))]

    return Semantics(value, gradients)


MEANINGS = {
    **{added: _added(norm.MEANINGS[kind]) for kind, added in NORMS.items()},
    **{gate: _gated(function) for function, gate in GATES.items()},
    "contracts": Semantics(_products, _products_gradients),
}
