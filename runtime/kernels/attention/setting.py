"""The settings of an attention call."""

from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from .layouts import padded, strides

Saved = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor]
"""What backward needs: q, k, v, the documents of queries and of keys, the result and its log-sum-exp."""


@dataclass(frozen=True)
class Setting:
    """The query of row r stands at r + shift among the keys, and sees from `back` behind that to `forth` ahead.

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
        """Of q, k and v from sample to sample, token to token, head to head; of documents but for heads."""
        ids = (self._id_strides(each) for each in (q_ids, k_ids))
        return tuple(chain(*(strides(each, self.seq) for each in (q, k, v)), *ids))

    def _id_strides(self, ids: Tensor | None) -> tuple[int, int]:
        return (0, 0) if ids is None else (ids.stride(1 - self.seq), ids.stride(self.seq))

    def constants(self, q: Tensor, k: Tensor, ids: Tensor | None) -> dict[str, int | float | bool]:
        """What kernels are compiled for."""
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
