"""The ops of emitted programs, on local tensors, that plain torch does not have.

Non-goals: no communication; what must be reduced over an axis is returned as a partial value and
reduced in sight.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..comm.mesh import Axis
from .plain_attention import wide

exp, sigmoid, tanh = torch.exp, torch.sigmoid, torch.tanh

_vector_norm: Callable[..., Tensor] = cast(Any, torch.linalg).vector_norm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the weight's dims, inside in float32 at least
    (arXiv:1910.07467).
    """
    return F.rms_norm(x, weight.shape, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float) -> Tensor:
    """(x − mean(x)) / sqrt(var(x) + eps) · weight + bias over the weight's dims, the last of x
    (arXiv:1607.06450).
    """
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def mean_square(x: Tensor, dim: int | tuple[int, ...], size: int) -> Tensor:
    """Σ x² / size over some dims, float32 at least; of global size `size`, so P over an axis
    that shards them.
    """
    return x.to(wide(x.dtype)).square().sum(dim) / size


def rms_scaled(x: Tensor, weight: Tensor, square: Tensor, eps: float) -> Tensor:
    """x / sqrt(square + eps) · weight: `rms_norm` over the weight's dims where no rank holds all of
    x.

    square: the mean of x² over these, whole, for each element of the other dims.
    """
    root = (square + eps).rsqrt().view(*square.shape, *(1 for _ in weight.shape))
    return (x * root * weight).to(x.dtype)


def mean(x: Tensor, dim: int | tuple[int, ...], size: int) -> Tensor:
    """Σ x / size over some dims of global size `size`, so P over an axis that shards them."""
    return (x.sum(dim, dtype=wide(x.dtype)) / size).to(x.dtype)


def concat(*tensors: Tensor) -> Tensor:
    """Tensors concatenated along their last dims, and repeated along other dims where they have
    size 1.
    """
    if len({x.shape[:-1] for x in tensors}) > 1:
        before: torch.Size = cast(Any, torch).broadcast_shapes(*(x.shape[:-1] for x in tensors))
        tensors = tuple(x.expand(*before, x.shape[-1]) for x in tensors)
    return torch.cat(tensors, dim=-1)


def split(x: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Consecutive slices of the last dim: the inverse of `concat`."""
    return x.split_with_sizes(sizes, dim=-1)


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x / cap): x bounded by ±cap (Gemma 2, arXiv:2408.00118)."""
    return cap * torch.tanh(x / cap)


def embedding(
    tokens: Tensor,
    table: Tensor,
    axis: Axis | None = None,
    lookup: Callable[..., Tensor] = F.embedding,
) -> Tensor:
    """Rows of `table` [v, h]; with an axis it holds this rank's part of the vocabulary, and the
    result is P over it.
    """
    if axis is None or axis.size == 1:
        return lookup(tokens, table)
    local = tokens - axis.rank * table.shape[0]
    outside = (local < 0) | (local >= table.shape[0])
    return lookup(local.masked_fill(outside, 0), table).masked_fill(outside.unsqueeze(-1), 0)


def count_valid(labels: Tensor) -> Tensor:
    """The number of labels ≥ 0, int64, 0-dim, where the labels are."""
    return (labels >= 0).sum()


def sum_squares(*tensors: Tensor, once: Axis | None = None) -> Tensor:
    """Sum of squares of all elements, 0-dim, float32 at least.  With `once`, it is zero except on
    the first rank of this axis.
    """
    norms: list[Tensor] = [_vector_norm(tensor, dtype=wide(tensor.dtype)) for tensor in tensors]
    squares = torch.stack(norms).square().sum()
    if once is not None and once.rank != 0:
        return torch.zeros_like(squares)
    return squares


def clip_scale(norm: Tensor, limit: float) -> Tensor:
    """The factor, at most 1, that brings a gradient of this norm to `limit` (as
    torch.nn.utils.clip_grad_norm_).
    """
    return (limit / (norm + 1e-6)).clamp(max=1.0)
