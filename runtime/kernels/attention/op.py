"""The attention that an emitted program calls, whole or around a ring of ranks."""

from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd import Function

from ...comm.mesh import Axis
from ...comm.positions import Positions
from ...ops import plain_attention
from ...ops.attention import attention, by_chunks
from ...ops.plain_attention import Saved, Setting
from ...ops.ring_attention import PLAIN, Backend, ring_attention
from ..launching import Tiled
from . import backward, forward
from .tiles import Blocks

Choice = Literal["torch", "triton", "plain"]
"""torch: scalec.runtime.attention, and what torch has for it; triton: our kernels; plain: their
twin.
"""


def backend(
    op: Tiled[Blocks], q: Tensor, k: Tensor, v: Tensor, *, special: bool, drops: bool
) -> Choice:
    """torch's kernels where it has some, ours where it has none, plain torch where we have none
    either.

    special: a mask other than a causal one, or a soft cap; drops: dropout.  torch's flash and cuDNN
    attention know neither; on GPUs they are for bfloat16 and float16, and copy q, k and v unless
    head_dim is a multiple of 8.  torch chooses between the two.  For float32 it has
    memory-efficient attention, where queries have as many heads as keys and rows are multiples of
    16 bytes, and else holds all scores.
    """
    dim = q.shape[-1]
    if drops or not (special or q.is_cuda or q.is_meta):
        return "torch"  # dropout has no kernel, and CPUs have flash attention
    if not special and q.dtype in (torch.bfloat16, torch.float16) and dim % 8 == 0 and dim <= 256:
        return "torch"  # flash or cuDNN attention
    if not special and q.dtype == torch.float32 and dim % 4 == 0 and q.shape[2] == k.shape[2]:
        return "torch"  # memory-efficient attention
    if blocks_for(op, q, k, v) is None:
        return "plain" if special else "torch"
    return "triton"


def blocks_for(op: Tiled[Blocks], q: Tensor, k: Tensor, v: Tensor) -> Blocks | None:
    """How the kernels divide their work; None where they do not serve, as for values of another
    size than keys.
    """
    if v.shape[-1] != q.shape[-1]:
        return None
    return op.tile_for(q.shape[-1], q, k, v)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ids: Tensor | None,
    k_ids: Tensor | None,
    how: Setting,
    blocks: Blocks | None,
) -> tuple[Tensor, Tensor]:
    """The result [as q] and its log-sum-exp [b, n, s], natural, float32 at least; in plain torch
    without blocks.

    Queries that see nothing have 0 and −∞.  Saves q, k, v, the documents and both results.
    """
    if k_ids is q_ids:
        k_ids = None  # torch.compile traces no tensor that is passed twice
    return cast(Any, _Attend).apply(q, k, v, q_ids, k_ids, how, blocks)


class _Attend(Function):
    """Attention by kernels or by plain torch, which save the same tensors.  The log-sum-exp has no
    gradient.
    """

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
        if k_ids is None:
            k_ids = q_ids
        operands = (q, k, v, q_ids, k_ids, how)
        if blocks is not None:
            out, lse = forward.forward(*operands, blocks.forward)
        else:
            out, lse = plain_attention.forward(*operands)
        ctx.save_for_backward(q, k, v, q_ids, k_ids, out, lse)
        ctx.how, ctx.blocks = how, blocks
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        arguments = cast(Saved, ctx.saved_tensors), grad_outputs[0], ctx.how
        if ctx.blocks is not None:
            gradients = backward.backward(*arguments, ctx.blocks)
        else:
            gradients = plain_attention.backward(*arguments)
        return *gradients, None, None, None, None


class Attention(Tiled[Blocks]):
    """softmax(cap(q·kᵀ · scale) + mask)·v, in blocks that stay on the chip (FlashAttention-2,
    arXiv:2307.08691).

    Tiles by head_dim.  Saves q, k, v, the result and its log-sum-exp, float32 [b, n, s]; besides
    them only backward takes memory, as much as the log-sum-exp.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: str = "bshd",
        causal: bool = True,
        window: int = 0,
        scale: float | None = None,
        softcap: float = 0.0,
        documents: Tensor | None = None,
        draws: Tensor | None = None,
        dropout: float = 0.0,
        site: int = 0,
        heads: Axis | None = None,
        positions: Positions | None = None,
        deterministic: bool = False,
    ) -> Tensor:
        """As `scalec.runtime.attention`."""
        seq = layout.index("s")
        window = window if window < k.shape[seq] else 0
        special = bool(window or softcap) or documents is not None
        if backend(self, q, k, v, special=special, drops=draws is not None) == "torch":
            options = (
                scale,
                softcap,
                documents,
                draws,
                dropout,
                site,
                heads,
                positions,
                deterministic,
            )
            return attention(q, k, v, layout, causal, window, *options)

        def part(q: Tensor, start: int, q_documents: Tensor | None) -> Tensor:
            return self.partial(
                q, k, v, seq, causal, window, scale, softcap, q_documents, documents, start
            )[0]

        if positions is None:
            return part(q, 0, documents)
        return by_chunks(part, q, seq, documents, positions, causal or window > 0)

    def partial(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seq: int,
        causal: bool = True,
        window: int = 0,
        scale: float | None = None,
        softcap: float = 0.0,
        q_documents: Tensor | None = None,
        k_documents: Tensor | None = None,
        shift: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Attention to some of the keys, and its log-sum-exp [b, n, s], natural, float32 at least.

        The first query is `shift` keys after the first key; `shift` may be less than 0.  Queries
        that see none of the keys have 0 and −∞.
        """
        back = window - 1  # -1, no limit, without a window
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        how = Setting(seq, factor, back, 0 if causal else back, softcap, shift)
        blocks = blocks_for(self, q, k, v)
        return attend(q, k, v, q_documents, k_documents, how, blocks)


class RingAttention(Tiled[Blocks]):
    """`scalec.runtime.ring_attention` by the kernels of `Attention`, with the same tiles; in plain
    torch without.

    Results of hops and gradients are float32 until the last hop.  Our kernels give float32, while
    each result of torch's flash attention on CUDA is rounded once to the element type of q.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        axis: Axis,
        layout: str = "bshd",
        causal: bool = True,
        window: int = 0,
        scale: float | None = None,
        softcap: float = 0.0,
        documents: Tensor | None = None,
        zigzag: bool = False,
        deterministic: bool = False,
    ) -> Tensor:
        """As `scalec.runtime.ring_attention`."""
        if axis.size == 1:
            whole = Attention(self.tiles)
            return whole(
                q,
                k,
                v,
                layout,
                causal,
                window,
                scale,
                softcap,
                documents,
                deterministic=deterministic,
            )
        options = (layout, causal, window, scale, softcap, documents, zigzag, deterministic)
        return ring_attention(q, k, v, axis, *options, backend=self.backend(q, k, v))

    def backend(self, q: Tensor, k: Tensor, v: Tensor) -> Backend:
        """The kernel for calls of a ring that torch's flash attention does not take."""
        blocks = blocks_for(self, q, k, v)
        if blocks is None:
            return PLAIN
        return Backend(
            partial(forward.forward, block=blocks.forward),
            partial(backward.backward, blocks=blocks),
        )
