"""Settings of an attention call, and layouts of its tensors: [s, b, n, d] with seq 0, [b, s, n, d] with seq 1.

Rows of numbers are [b, n, s].
"""

from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from .. import launching

_FAR = 2**31 // 256
"""Inside of a tile of at most 256 tokens, kernels count elements in 32 bits."""


def sizes(x: Tensor, seq: int) -> tuple[int, int, int]:
    """Batch, sequence and heads."""
    return x.shape[1 - seq], x.shape[seq], x.shape[2]


def strides(x: Tensor, seq: int) -> tuple[int, int, int]:
    """Elements from sample to sample, from token to token and from head to head."""
    assert x.stride(seq) < _FAR, f"attention: {x.stride(seq)} elements from token to token"
    return x.stride(1 - seq), x.stride(seq), x.stride(2)


def unit(x: Tensor) -> Tensor:
    """x, or a copy where neighbours along its last dim are not neighbours in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


def across(rows: Tensor, seq: int) -> Tensor:
    """Rows [b, n, s] as a factor of tensors that lie in the layout."""
    return rows.movedim(-1, seq).unsqueeze(-1)


def padded(dim: int) -> int:
    """The width of tiles: the next power of two, and as much as a product of matrices needs."""
    return max(launching.padded(dim), 16)


Saved = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor]
"""Saved for backward: q, k, v, the documents of queries and of keys, the result and its log-sum-exp."""


@dataclass(frozen=True)
class Setting:
    """The query of row r is at key r + shift, and sees from `back` before that to `forth` after it.

    back or forth -1 is no limit, cap 0 none.
    """

    seq: int
    scale: float
    back: int
    forth: int
    cap: float = 0.0
    shift: int = 0

    def operand_strides(
        self, q: Tensor, k: Tensor, v: Tensor, q_ids: Tensor | None, k_ids: Tensor | None
    ) -> tuple[int, ...]:
        """Strides of q, k and v between samples, tokens and heads; of documents but for heads."""
        ids = (self._id_strides(each) for each in (q_ids, k_ids))
        return tuple(chain(*(strides(each, self.seq) for each in (q, k, v)), *ids))

    def _id_strides(self, ids: Tensor | None) -> tuple[int, int]:
        return (0, 0) if ids is None else (ids.stride(1 - self.seq), ids.stride(self.seq))

    def constants(self, q: Tensor, k: Tensor, ids: Tensor | None) -> dict[str, int | float | bool]:
        """The constants that kernels are compiled for."""
        dim = q.shape[-1]
        return {
            "GROUP": q.shape[2] // k.shape[2],
            "D": dim,
            "DP": padded(dim),
            "BACK": self.back,
            "FORTH": self.forth,
            "CAP": self.cap,
            "DOCUMENTS": ids is not None,
        }
