"""Layouts of attention tensors: [s, b, n, d] with seq 0, [b, s, n, d] with seq 1, and rows [b, n, s] of numbers."""

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
