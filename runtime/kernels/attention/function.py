"""Attention as one autograd function, whose forward and backward are the kernels or plain torch."""

from typing import Any, cast

from torch import Tensor
from torch.autograd import Function

from . import backward, forward, plain
from .setting import Saved, Setting
from .tiles import Blocks


def attend(
    q: Tensor, k: Tensor, v: Tensor, q_ids: Tensor | None, k_ids: Tensor | None, how: Setting, blocks: Blocks | None
) -> tuple[Tensor, Tensor]:
    """The result [as q] and its log-sum-exp [b, n, s], natural, float32 at least; in plain torch without blocks.

    Queries that see nothing have 0 and −∞.  Saves q, k, v, the documents and both results.
    """
    k_ids = None if k_ids is q_ids else k_ids  # torch.compile traces no tensor that is given twice
    return cast(Any, _Attend).apply(q, k, v, q_ids, k_ids, how, blocks)


class _Attend(Function):
    """Both results have gradients: that of the log-sum-exp adds to each score's as much as the score's weight."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_ids: Tensor | None,
        k_ids: Tensor | None,
        how: Setting,
        blocks: Blocks | None,
    ) -> tuple[Tensor, Tensor]:
        k_ids = q_ids if k_ids is None else k_ids
        given = (q, k, v, q_ids, k_ids, how)
        out, lse = forward.forward(*given, blocks.forward) if blocks else plain.forward(*given)
        ctx.save_for_backward(q, k, v, q_ids, k_ids, out, lse)
        ctx.how, ctx.blocks = how, blocks
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        g_out, g_lse = grad_outputs
        saved = cast(Saved, ctx.saved_tensors)
        g_out = saved[5].new_zeros(saved[5].shape) if g_out is None else g_out
        if ctx.blocks:
            gradients = backward.backward(saved, g_out, g_lse, ctx.how, ctx.blocks)
        else:
            gradients = plain.backward(saved, g_out, g_lse, ctx.how)
        return *gradients, None, None, None, None
