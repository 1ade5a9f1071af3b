"""Cross entropy in parts, each relative to its rank's own largest logit, and what they are relative to that of all."""

from fractions import Fraction

from ...ir import Kind, Type, sharded
from ..tensors import Dims, Tensor
from .call import Call, Semantics
from .loss import Capped, number


def _shared(x: Tensor, dims: Dims) -> Tensor:
    """A value that each rank has one of, with a dim for the ranks appended."""
    return Tensor(dims, x.array[..., None], x.degree)


def _parts(c: Call) -> list[Tensor]:
    """m, z relative to it in a dim of its own, and t, which is relative to nothing."""
    logits = Capped(c)
    m = logits.peak()
    z = logits.n.product(logits.tokens, logits.exponential(m))
    return [m, _shared(z, c.op.outputs[1].type.dims), logits.n.product(logits.tokens, logits.target, logits.x)]


def _logit_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    """The gradient of z has the dim of shares, and each rank one of them."""
    logits, (dz, dt) = Capped(c), grads[-2:]
    return [logits.gradient(logits.n.product(logits.tokens, dz), dt, c.results[0]), None]


# ---- rescaled to the largest of all


def _below(c: Call, m: Tensor, peak: Tensor) -> Tensor:
    return c.numbers.exponential(m, peak)


def _rescaled(c: Call) -> list[Tensor]:
    n, (m, z, t, peak, _) = c.numbers, c.args
    lost = n.negative(n.product(t.dims, _share_of_labels(c), peak))
    return [n.product(m.dims, z, _below(c, m, peak)), n.total(t.dims, t, lost)]


def _share_of_labels(c: Call) -> Tensor:
    """The part of each label that this rank's classes have."""
    n, labels, classes = c.numbers, c.args[4], str(c.op.get("classes"))
    m = c.types[0]
    type = Type(m.dtype, (classes,), tuple((axis, sharded(classes)) for axis in m.axes_in(Kind.MAXIMUM)))
    index, dims, share = c.world.indices(type, classes), (*labels.dims, classes), Fraction(c.number("smoothing"))
    is_label = (labels.onto(dims) == Tensor((classes,), index).onto(dims)).astype(int)
    real = n.constant((index < c.program.valid(classes)).astype(int), (classes,))
    hot = n.product(labels.dims, n.constant(is_label, dims), number(n, 1 - share))
    each = n.product((), real, number(n, share / c.program.valid(classes)))
    return n.total(labels.dims, hot, each)


def _rescaled_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    m, z, _, peak, _ = c.args
    dz = c.numbers.product(m.dims, grads[0], _below(c, m, peak))
    return [None, _shared(dz, z.dims), grads[1], None, None]


MEANINGS = {
    "logit_softmax_stats": Semantics(_parts, _logit_gradients),
    "rescale_to_global_max": Semantics(_rescaled, _rescaled_gradients),
}
