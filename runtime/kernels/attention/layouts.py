"""How kernels see a call of attention: strides of its tensors, which lie as in plain attention, and constants."""

from itertools import chain

from torch import Tensor

from ...ops.plain_attention import Setting
from .. import launching

_FAR = 2**31 // 256
"""Inside of a tile of at most 256 tokens, kernels count elements in 32 bits."""


def strides(x: Tensor, seq: int) -> tuple[int, int, int]:
    """Elements from sample to sample, from token to token and from head to head."""
    assert x.stride(seq) < _FAR, f"attention: {x.stride(seq)} elements from token to token"
    return x.stride(1 - seq), x.stride(seq), x.stride(2)


def unit(x: Tensor) -> Tensor:
    """x, or a copy where neighbours along its last dim are not neighbours in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


def padded(dim: int) -> int:
    """The width of tiles: the next power of two, and as much as a product of matrices needs."""
    return max(launching.padded(dim), 16)


def operand_strides(
    q: Tensor, k: Tensor, v: Tensor, q_ids: Tensor | None, k_ids: Tensor | None, seq: int
) -> tuple[int, ...]:
    """Strides of q, k and v between samples, tokens and heads; of documents but for heads."""
    ids = ((0, 0) if each is None else (each.stride(1 - seq), each.stride(seq)) for each in (q_ids, k_ids))
    return tuple(chain(*(strides(each, seq) for each in (q, k, v)), *ids))


def constants(how: Setting, q: Tensor, k: Tensor, ids: Tensor | None) -> dict[str, int | float | bool]:
    """The constants that kernels are compiled for."""
    dim = q.shape[-1]
    return {
        "GROUP": q.shape[2] // k.shape[2],
        "D": dim,
        "DP": padded(dim),
        "BACK": how.back,
        "FORTH": how.forth,
        "CAP": how.cap,
        "DOCUMENTS": ids is not None,
    }
