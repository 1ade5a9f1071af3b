"""Positions along a dim that are joined, taken apart, or moved."""

import numpy as np

from ...ops import OPS
from ..layout import join_last_dim, permute_positions, split_last_dim
from ..tensors import Tensor
from .call import Call, Semantics


def _split(c: Call) -> list[Tensor]:
    parts = c.op.names("parts")
    return split_last_dim(c.numbers, c.args[0], [c.world.dims[part] for part in parts], parts)


def _permute(c: Call) -> list[Tensor]:
    """The positions in the op's order."""
    (x,), (over,), permutes = c.args, c.op.names("over"), OPS[c.op.kind].permutes
    assert permutes, f"verify: {c.op.kind} permutes nothing"
    order = np.array(permutes(c.op, c.world.dims[over]))
    return [permute_positions(c.numbers, x, over, order)]


MEANINGS = {
    "concat": Semantics(lambda c: [join_last_dim(c.numbers, c.args, c.dims)]),
    "split": Semantics(_split),
    **{kind: Semantics(_permute) for kind, entry in OPS.items() if entry.permutes},
}
