"""What a call of attention asks for, and how its tensors lie."""

from dataclasses import dataclass

from torch import Tensor

from ..launching import padded

Saved = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor]
"""What backward needs: q, k, v, the documents of queries and of keys, the result and its log-sum-exp."""


@dataclass(frozen=True)
class Setting:
    """A query at row r stands at r + shift among the keys, and sees from `back` behind to `forth` ahead; -1 is no limit.

    seq is the sequence dim: 0 for [s, b, n, d], 1 for [b, s, n, d].  cap 0 is none.
    """

    seq: int
    scale: float
    back: int
    forth: int
    cap: float = 0.0
    shift: int = 0

    def sizes(self, x: Tensor) -> tuple[int, int, int]:
        """Batch, sequence and heads."""
        return x.shape[1 - self.seq], x.shape[self.seq], x.shape[2]

    def strides(self, x: Tensor) -> tuple[int, int, int]:
        """Elements from sample to sample, from token to token and from head to head."""
        return x.stride(1 - self.seq), x.stride(self.seq), x.stride(2)

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


def unit(x: Tensor) -> Tensor:
    """x, or a copy where its last dim is not dense."""
    return x if x.stride(-1) == 1 else x.contiguous()
