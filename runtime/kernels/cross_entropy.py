"""Cross entropy of logits in memory: one pass in forward, one in backward.

Over a sharded vocabulary each rank has the parts of its own logits, `LogitSoftmaxStats`.  One small
collective finds the largest m, and `rescale_to_global_max` brings all parts to it.  Two more sum
the parts over ranks, for `token_loss`.  All three lie outside of the logits' Function, whose
backward is one pass all the same: z's gradient carries exp(m − peak).

Source: Shoeybi et al. 2019, section 3 (arXiv:1909.08053); Milakov and Gimelshein 2018
(arXiv:1805.02867).
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from ..comm.mesh import Axis
from ..ops.token_losses import token_loss
from .launching import Tile, Tiled, matrix
from .logits import Classes, Parts, add_parts, classes_of, new_parts, put_gradient


class LogitSoftmaxStats(Tiled[Tile]):
    """m = max l, z = Σ exp(l − m) and t = l[label] or 0 for a label elsewhere, of this rank's
    logits l.

    logits [..., v], labels [...] of the whole vocabulary, < 0 for none; m, z, t [...] in float32,
    float64 for float64.  m is without gradient and, from z and t through `rescale_to_global_max`,
    the loss does not depend on it.  The first `classes` of the v of all ranks of the axis are
    classes, by default all; a rank without any has z = 0 and the lowest finite m.  With `smoothing`
    s, t is (1 − s) · l[label] + s · Σ l / classes.  With `cap`, l is cap · tanh(logit / cap).

    Saves logits, labels and m; backward makes the logits' gradient alone, in their dtype.  Rows
    must be without gaps inside, else logits are copied.  A kernel serves v that have a tile.
    """

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        axis: Axis | None = None,
        classes: int | None = None,
        smoothing: float = 0.0,
        cap: float = 0.0,
    ) -> Parts:
        """m, z, t."""
        return _parts(
            self, logits, labels, classes_of(logits.shape[-1], axis, classes, smoothing, cap)
        )


class CrossEntropy(Tiled[Tile]):
    """Sum of token losses over a whole vocabulary, 0-dim, as `scalec.runtime.cross_entropy` has it;
    and soft-capped.

    Saves what `LogitSoftmaxStats` does, and of each token z, whether it has a label and, with a
    z-loss, log z + m.
    """

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        classes: int | None = None,
        smoothing: float = 0.0,
        z: float = 0.0,
        cap: float = 0.0,
    ) -> Tensor:
        """logits [..., v], labels [...]; labels < 0 are ignored.

        `z` weighs the z-loss (arXiv:2204.02311).
        """
        local_classes = classes_of(logits.shape[-1], None, classes, smoothing, cap)
        m, total, t = _parts(self, logits, labels, local_classes)
        return token_loss(total, t - m, labels, m if z else None, z)


def rescale_to_global_max(
    m: Tensor,
    z: Tensor,
    t: Tensor,
    peak: Tensor,
    labels: Tensor,
    axis: Axis | None = None,
    *,
    columns: int,
    classes: int | None = None,
    smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """A rank's parts in terms of the peak, the largest m of all ranks: z and t as
    `local_softmax_stats` has them.

    z' = z · exp(m − peak) and t' = t − weight · peak, with the weight of a token's label among this
    rank's `columns` classes: the weights of all ranks add up to 1.  Both are [...] and P over the
    axis.  Saves exp(m − peak).
    """
    weight = classes_of(columns, axis, classes, smoothing).weight(labels, m.dtype)
    return z * (m - peak).exp(), t - weight * peak


def _parts(op: Tiled[Tile], logits: Tensor, labels: Tensor, classes: Classes) -> Parts:
    tile = op.tile_for(logits.shape[-1], logits)
    return cast(Any, _LogitParts).apply(logits, labels, classes, tile)


class _LogitParts(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, classes: Classes, tile: Tile | None
    ) -> Parts:
        rows = matrix(logits, logits.shape[-1])
        parts = new_parts(rows)
        add_parts(rows, labels.reshape(-1).contiguous(), parts, classes, tile)
        m, z, t = (part.view(labels.shape) for part in parts)
        ctx.mark_non_differentiable(m)
        ctx.save_for_backward(logits, labels, m)
        ctx.classes, ctx.tile = classes, tile
        return m, z, t

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels, m = cast(tuple[Tensor, ...], ctx.saved_tensors)
        gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
        g_z, g_t = (of_part.reshape(-1).contiguous() for of_part in grad_outputs[1:])
        put_gradient(
            gradient.view(-1, logits.shape[-1]),
            matrix(logits, logits.shape[-1]),
            labels.reshape(-1).contiguous(),
            m.view(-1),
            (g_z, g_t),
            ctx.classes,
            ctx.tile,
        )
        return gradient, None, None, None
