"""Table look-up as a product with one-hot ids: an id whose row another rank holds counts zero."""

from ..tensors import Tensor
from .call import Call, Semantics


def _embedding(c: Call) -> list[Tensor]:
    table = c.args[1]
    return [c.numbers.product(c.dims, c.hot(0, 1, table.dims[0]), table)]


def _gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    table = c.args[1]
    return [None, c.numbers.product(table.dims, c.hot(0, 1, table.dims[0]), grads[0])]


MEANINGS = {"embedding": Semantics(_embedding, _gradients)}
