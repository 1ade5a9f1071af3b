"""What a call of attention asks for, and how its tensors lie."""

from dataclasses import dataclass

from torch import Tensor

from ..launching import padded

Saved = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor]
"""What backward needs: q, k, v, the documents of queries and of keys, the result and its log-sum-exp."""


@dataclass(frozen=True)
class Setting:
    """A query at row r stands at r + shift among the keys, and sees from `back` behind to `forth` ahead; -1 is no limit.

    cap 0 is none.
    """

    seq: int
    scale: float
    back: int
    forth: int
    cap: float = 0.0
    shift: int = 0

    def id_strides(self, ids: Tensor | None) -> tuple[int, int]:
        """From sample to sample and from token to token."""
        return (0, 0) if ids is None else (ids.stride(1 - self.seq), ids.stride(self.seq))

    def constants(self, q: Tensor, k: Tensor, ids: Tensor | None) -> dict[str, int | float | bool]:
        """What kernels are compiled for."""
        dim = q.shape[-1]
        return {
            "GROUP": q.shape[2] // k.shape[2],
            "D": dim,
            "DP": max(padded(dim), 16),
            "BACK": self.back,
            "FORTH": self.forth,
            "CAP": self.cap,
            "DOCUMENTS": ids is not None,
        }

