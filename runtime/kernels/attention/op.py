"""The attention that an emitted program calls."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ...comm.mesh import Axis
from ...ops import functional
from .. import launching
from .backend import backend
from .function import attend
from .setting import Setting
from .tiles import Blocks


@dataclass(frozen=True)
class Attention:
    """softmax(cap(q·kᵀ · scale) + mask)·v, in blocks that stay on the chip (FlashAttention-2, arXiv:2307.08691).

    blocks: for each head_dim that has kernels, how they divide their work.  Saves q, k, v, the result and its
    log-sum-exp, float32 [b, n, s]; of memory besides that takes only as much in backward.
    """

    blocks: Mapping[int, Blocks]

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seq: int,
        causal: bool = True,
        window: int = 0,
        scale: float | None = None,
        softcap: float = 0.0,
        documents: Tensor | None = None,
        draws: Tensor | None = None,
        dropout: float = 0.0,
        site: int = 0,
        heads: Axis | None = None,
    ) -> Tensor:
        """As `scalec.runtime.attention`."""
        window = window if window < q.shape[seq] else 0
        special = bool(window or softcap) or documents is not None
        choice = backend(self, self.blocks, q, k, v, special=special, drops=draws is not None)
        if choice.backend == "torch":
            options = (scale, softcap, documents, draws, dropout, site, heads)
            return functional.attention(q, k, v, seq, causal, window, *options)
        return self.partial(q, k, v, seq, causal, window, scale, softcap, documents, documents)[0]

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
        """Attention to some of the keys, and its log-sum-exp [b, n, s], natural, float32 at least: for `Merge`.

        The first query stands `shift` behind the first key, which may be less than 0.  Queries that see none of the
        keys have 0 and −∞.
        """
        back = window - 1  # -1, no limit, without a window
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        how = Setting(seq, factor, back, 0 if causal else back, softcap, shift)
        blocks = launching.tile_for(self, self.blocks, q.shape[-1], q, k, v)
        return attend(q, k, v, q_documents, k_documents, how, blocks)
