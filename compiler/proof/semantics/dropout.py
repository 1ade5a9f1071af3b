"""Dropout: a product with numbers that are a keyed function of the sample's draw, the site and
the global index.
"""

from collections.abc import Sequence

import numpy as np

from ..tensors import Array, Dims, Tensor
from .call import Call, Semantics

LAYERS = 1000
"""The numbers of each draw for the layers of a repeat, more than small repeats have."""


def keep_factors(
    c: Call, draws: Tensor, share: float, places: Sequence[tuple[str, Array]]
) -> Tensor:
    """The factors of elements: their dims are the dims of `draws` and of `places`, each with its
    global indices.

    In the field these are any numbers: steps that agree for all of them agree for 0 and 1 / (1 −
    share).
    """
    n = c.numbers
    dims: Dims = (*draws.dims, *(dim for dim, _ in places))
    operands = [Tensor(dims, n.constant(draws.onto(dims), dims).array)]
    for dim, indices in places:
        index = Tensor((dim,), indices)
        operands.append(Tensor(dims, n.constant(index.onto(dims), dims).array))
    return n.function("kept", *operands, constants=(c.get("site"), share))


def _drop(c: Call) -> list[Tensor]:
    x, draws = c.args
    places = [(dim, c.indices(0, dim)) for dim in x.dims if dim not in draws.dims]
    return [c.numbers.product(x.dims, x, keep_factors(c, draws, c.number("p"), places))]


def _fork(c: Call) -> list[Tensor]:
    """Integers that no other draw nor iteration has: small repeats have fewer layers than
    `LAYERS`.
    """
    (draws,) = c.args
    layer = np.arange(c.world.dims[c.dims[0]]).reshape(-1, *(1,) * len(draws.dims))
    return [Tensor(c.dims, (np.expand_dims(draws.array, draws.lead) + 1) * LAYERS + layer)]


MEANINGS = {
    "dropout": Semantics(_drop),
    "fork": Semantics(_fork),
}
