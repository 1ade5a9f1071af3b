"""Losses of tokens and the statistics that they are made of, over a vocabulary that ranks may
share out.
"""

from typing import Any, cast

from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from ..comm.mesh import Axis
from .plain_attention import wide


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    classes: int | None = None,
    smoothing: float = 0.0,
    z: float = 0.0,
) -> Tensor:
    """Sum of token losses, 0-dim, float32 at least.  logits [..., v], labels [...]; labels < 0 are
    ignored.

    The first `classes` columns of v are classes, by default all; the others are padding, of
    probability 0.  A share `smoothing` of each label goes to all classes alike (arXiv:1512.00567);
    z · (log Σ exp(logits))² is added (arXiv:2204.02311).
    """
    if smoothing or z:
        peak = max_logit(logits, classes=classes)
        parts = local_softmax_stats(logits, peak, labels, classes=classes, smoothing=smoothing)
        return token_loss(*parts, labels, peak if z else None, z)
    logits = logits[..., :classes].flatten(0, -2).to(wide(logits.dtype))
    return F.cross_entropy(logits, labels.flatten().clamp(min=-1), ignore_index=-1, reduction="sum")


def max_logit(logits: Tensor, axis: Axis | None = None, classes: int | None = None) -> Tensor:
    """The largest logit [...] of [..., v], float32 at least, without gradient; max-partial over a
    sharded v.

    Only the first `classes` columns of the full vocabulary are real, by default all; the rest is
    padding.
    """
    return _real(logits, axis, classes).detach().amax(-1).to(wide(logits.dtype))


def _real(logits: Tensor, axis: Axis | None, classes: int | None) -> Tensor:
    """This rank's logits without padding."""
    if classes is None:
        return logits
    first = axis.rank * logits.shape[-1] if axis else 0
    return logits[..., : classes - first]


def local_softmax_stats(
    logits: Tensor,
    m: Tensor,
    labels: Tensor,
    axis: Axis | None = None,
    classes: int | None = None,
    smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """z = Σ exp(logit − m) and t = the label's logit − m, or 0 for a label elsewhere, both [...]; P
    over the axis of v.

    m is taken as constant: its gradients through z and through `token_loss` cancel.  The first
    `classes` of the v of all ranks of the axis are classes, by default all.  With `smoothing` s, t
    is (1 − s) times this t, plus s · Σ (logit − m) / classes.
    """
    size = logits.shape[-1]
    first, all_columns = 0, size
    if axis is not None:
        first, all_columns = axis.rank * size, axis.size * size
    class_share = smoothing / (all_columns if classes is None else classes)
    return cast(Any, _SoftmaxParts).apply(
        _real(logits, axis, classes), m, labels - first, smoothing, class_share
    )


class _SoftmaxParts(Function):
    """Saves the logits alone, and backward makes one tensor of their size."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, m: Tensor, labels: Tensor, smoothing: float, class_share: float
    ) -> tuple[Tensor, Tensor]:
        outside = ((labels < 0) | (labels >= logits.shape[-1])).unsqueeze(-1)
        index = labels.unsqueeze(-1).masked_fill(outside, 0)
        ctx.save_for_backward(logits, m, index, outside)
        ctx.smoothing, ctx.class_share = smoothing, class_share
        below = logits - m.unsqueeze(-1)
        t = (logits.gather(-1, index) - m.unsqueeze(-1)).masked_fill(outside, 0).squeeze(-1)
        if smoothing:
            t = (1 - smoothing) * t + class_share * below.sum(-1)
        return below.exp_().sum(-1), t

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        g_z, g_t = grad_outputs
        logits, m, index, outside = cast(tuple[Tensor, ...], ctx.saved_tensors)
        gradient = (logits - m.unsqueeze(-1)).exp_().mul_(g_z.unsqueeze(-1))
        if ctx.smoothing:
            gradient.add_(g_t.unsqueeze(-1), alpha=ctx.class_share)
            g_t = (1 - ctx.smoothing) * g_t
        gradient.scatter_add_(-1, index, g_t.unsqueeze(-1).masked_fill(outside, 0))
        return gradient.to(logits.dtype), None, None, None, None


def token_loss(
    z: Tensor, t: Tensor, labels: Tensor, m: Tensor | None = None, z_loss: float = 0.0
) -> Tensor:
    """Σ log z − t over tokens with label ≥ 0, 0-dim; the others add nothing to value or gradient.

    m: the value subtracted from the logits, as in `local_softmax_stats`; with it, z_loss · (log z +
    m)² is added (arXiv:2204.02311).
    """
    log = z.log()
    loss = log - t
    if m is not None:
        loss = loss + z_loss * (log + m).square()
    return loss.masked_fill(labels < 0, 0).sum()
