"""Positions along a dim that are joined, taken apart, or moved."""

from collections.abc import Sequence

import numpy as np

from ...ops import OPS
from ..tensors import Dims, Tensor, degree_of
from .call import Call, Semantics


def join_tensors(args: Sequence[Tensor], dims: Dims) -> Tensor:
    """The tensors side by side along the last dim; some may be the same on all ranks."""
    arrays = [x.onto((*dims[:-1], x.dims[-1])) for x in args]
    before = np.broadcast_shapes(*(array.shape[:-1] for array in arrays))
    parts = [np.broadcast_to(array, (*before, array.shape[-1])) for array in arrays]
    return Tensor(dims, np.concatenate(parts, axis=-1), degree_of(args))


def _split_tensor(c: Call, x: Tensor, parts: Dims) -> list[Tensor]:
    """Slices along the last dim."""
    ends = np.cumsum([c.world.dims[part] for part in parts])
    arrays = np.split(x.array, ends[:-1], axis=-1)
    slices = list[Tensor]()
    for part, array in zip(parts, arrays, strict=True):
        slices.append(Tensor((*x.dims[:-1], part), array, x.degree))
    return slices


def _concat_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    parts = _split_tensor(c, grads[0], tuple(x.dims[-1] for x in c.args))
    return [c.numbers.product(x.dims, part) for x, part in zip(c.args, parts, strict=True)]


def _permute(c: Call, x: Tensor, back: bool = False) -> Tensor:
    """The positions in the op's order, or `back` from there."""
    (over,), permutes = c.op.names("over"), OPS[c.op.kind].permutes
    assert permutes, f"verify: {c.op.kind} permutes nothing"
    order = np.array(permutes(c.op, c.world.dims[over]))
    if back:
        order = np.argsort(order)
    return Tensor(x.dims, np.take(x.array, order, x.lead + x.dims.index(over)), x.degree)


_PERMUTED = Semantics(
    lambda c: [_permute(c, c.args[0])], lambda c, grads: [_permute(c, grads[0], back=True)]
)

MEANINGS = {
    "concat": Semantics(lambda c: [join_tensors(c.args, c.dims)], _concat_gradients),
    "split": Semantics(
        lambda c: _split_tensor(c, c.args[0], c.op.names("parts")),
        lambda c, grads: [join_tensors(grads, c.args[0].dims)],
    ),
    **{kind: _PERMUTED for kind, entry in OPS.items() if entry.permutes},
}
