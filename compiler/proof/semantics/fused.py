"""Ops that are fused of others: what each of those means, one after the other."""

from ...ops.fused import GATES, NORMS
from ..tensors import Tensor
from .call import Call, Semantics
from .norm import NORM_GRADIENTS, NORM_VALUES
from .pointwise import applied, slope

# ---- a sum and its norm


def _added(norm: str) -> dict[str, Semantics]:
    """x + y and its norm; the gradient of x, which is that of y."""
    value, (dx, dw) = NORM_VALUES[norm], NORM_GRADIENTS[norm]

    def both(c: Call) -> list[Tensor]:
        x, y, *weights = c.args
        total = c.numbers.total(x.dims, x, y)
        return [total, value(c, total, *weights)]

    def terms(c: Call, d_sum: Tensor, d_norm: Tensor, weight: Tensor, total: Tensor) -> Tensor:
        return c.numbers.total(total.dims, d_sum, dx(c, d_norm, weight, total))

    def gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
        x, y, weight, *bias = c.args
        total = c.numbers.total(x.dims, x, y)
        d_sum, d_norm = grads
        each = terms(c, d_sum, d_norm, weight, total)
        return [each, each, dw(c, d_norm, weight, total), *(c.numbers.product(b.dims, d_norm) for b in bias)]

    return {f"add_{norm}": Semantics(both, gradients), f"add_{norm}_dx": Semantics(lambda c: [terms(c, *c.args)])}


# ---- several products of one value


def _products(c: Call) -> list[Tensor]:
    x, *weights = c.args
    return [c.numbers.product(value.type.dims, x, w) for value, w in zip(c.op.outputs, weights, strict=True)]


def _sum_of_products(c: Call, grads: list[Tensor], weights: list[Tensor], like: Tensor | None = None) -> Tensor:
    dims = like.dims if like else c.dims
    pairs = zip(grads, weights, strict=True)
    return c.numbers.total(dims, *(c.numbers.product(dims, grad, weight) for grad, weight in pairs))


def _products_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    x, *weights = c.args
    own = (c.numbers.product(w.dims, grad, x) for grad, w in zip(grads, weights, strict=True))
    return [_sum_of_products(c, grads, weights, x), *own]


def _products_dx(c: Call) -> list[Tensor]:
    half = len(c.args) // 2
    return [_sum_of_products(c, [*c.args[:half]], [*c.args[half:]])]


# ---- a gate


def _gated(function: str) -> dict[str, Semantics]:
    """f(x) · y, and the gradients of both."""

    def value(c: Call) -> list[Tensor]:
        x, y = c.args
        return [c.numbers.product(x.dims, applied(c, function, x), y)]

    def back(c: Call, dy: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
        n = c.numbers
        return [n.product(x.dims, dy, y, slope(c, function, x)), n.product(x.dims, dy, applied(c, function, x))]

    name = GATES[function]
    return {
        name: Semantics(value, lambda c, grads: [*back(c, grads[0], *c.args)]),
        f"{name}_dx": Semantics(lambda c: back(c, *c.args)),
    }


MEANINGS = {
    **{kind: meaning for norm in NORMS for kind, meaning in _added(norm).items()},
    **{kind: meaning for function in GATES for kind, meaning in _gated(function).items()},
    "contracts": Semantics(_products, _products_gradients),
    "contracts_dx": Semantics(_products_dx),
}
