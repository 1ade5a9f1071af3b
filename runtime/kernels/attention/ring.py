"""Attention around a ring of ranks; kernels do the calls that they serve and torch's flash attention does not take."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ...comm.mesh import Axis
from ...ops.ring_attention import PLAIN, Backend, ring_attention
from . import backward, forward
from .op import Attention, blocks_for
from .tiles import Blocks


@dataclass(frozen=True)
class RingAttention:
    """`scalec.runtime.ring_attention` by the kernels of `Attention`, with the same blocks; in plain torch without.

    Results of hops and gradients are float32 until the last hop, as are those that kernels give; those of torch's flash
    attention on CUDA are rounded once each to the element type of q.
    """

    blocks: Mapping[int, Blocks]

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
            whole = Attention(self.blocks)
            return whole(q, k, v, layout, causal, window, scale, softcap, documents, deterministic=deterministic)
        options = (layout, causal, window, scale, softcap, documents, zigzag, deterministic)
        return ring_attention(q, k, v, axis, *options, backend=self.backend(q, k, v))

    def backend(self, q: Tensor, k: Tensor, v: Tensor) -> Backend:
        """The kernel for calls of a ring that torch's flash attention does not take."""
        blocks = blocks_for(self, self.blocks, q, k, v)
        if blocks is None:
            return PLAIN
        return Backend(partial(forward.forward, block=blocks.forward), partial(backward.backward, blocks=blocks))
