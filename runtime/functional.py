"""The ops of emitted programs, on local tensors, where plain torch does not already say them.

Non-goals: no communication; what must be reduced over an axis is returned as a partial value and reduced in sight.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from .mesh import Axis, Mesh

exp, sigmoid, tanh = torch.exp, torch.sigmoid, torch.tanh

_vector_norm: Callable[..., Tensor] = cast(Any, torch.linalg).vector_norm


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are kept: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dim, inside in float32 at least (arXiv:1910.07467)."""
    return F.rms_norm(x, weight.shape, weight, eps)


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x / cap): x bounded by ±cap (Gemma 2, arXiv:2408.00118)."""
    return cap * torch.tanh(x / cap)


def embedding(tokens: Tensor, table: Tensor, axis: Axis | None = None) -> Tensor:
    """Rows of `table` [v, h]; with an axis it holds this rank's part of the vocabulary, and the result is P over it."""
    if axis is None or axis.size == 1:
        return F.embedding(tokens, table)
    local = tokens - axis.rank * table.shape[0]
    outside = (local < 0) | (local >= table.shape[0])
    return F.embedding(local.masked_fill(outside, 0), table).masked_fill(outside.unsqueeze(-1), 0)


def rope_table(
    seq: int, dim: int, theta: float, between: int, mesh: Mesh, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Cosines and signed sines of rotary positions, [2, seq, 1 × between, dim], for `rope` (arXiv:2104.09864).

    `between` is the number of dims between seq and head_dim in the tensors to rotate.
    """
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=mesh.device) / dim)
    angle = torch.arange(seq, dtype=torch.float64, device=mesh.device).outer(frequency)
    sine = angle.sin()
    table = torch.stack([angle.cos().repeat(1, 2), torch.cat([-sine, sine], dim=1)])
    return table.to(dtype).view(2, seq, *(1 for _ in range(between)), dim)


def rope(x: Tensor, table: Tensor) -> Tensor:
    """Rotary positions: rotates (x[i], x[i + d/2]) of the last dim d by the angles of `rope_table`."""
    cosine, sine = table.unbind()
    return torch.addcmul(x * cosine, x.roll(x.shape[-1] // 2, -1), sine)


def attention(q: Tensor, k: Tensor, v: Tensor, seq: int) -> Tensor:
    """Causal attention, scaled by d^-1/2.  seq is the sequence dim: 0 for [s, b, n, d], 1 for [b, s, n, d].

    k and v may have fewer heads: head i of q attends to head i // (n / k) of k.
    """
    q, k, v = q.movedim(seq, -2), k.movedim(seq, -2), v.movedim(seq, -2)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.movedim(-2, seq)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of token losses, 0-dim, float32 at least.  logits [..., v], labels [...]; labels < 0 are ignored."""
    logits = logits.flatten(0, -2).to(_wide(logits.dtype))
    return F.cross_entropy(logits, labels.flatten().clamp(min=-1), ignore_index=-1, reduction="sum")


def max_logit(logits: Tensor) -> Tensor:
    """The largest logit [...] of [..., v], float32 at least, without gradient; max-partial over a sharded v."""
    return logits.detach().amax(-1).to(_wide(logits.dtype))


def softmax_parts(logits: Tensor, m: Tensor, labels: Tensor, axis: Axis | None = None) -> tuple[Tensor, Tensor]:
    """z = Σ exp(logit − m) and t = the label's logit − m, or 0 for a label elsewhere, both [...]; P over the axis of v.

    m is taken as constant: its gradients through z and through `token_loss` cancel.
    """
    first = axis.rank * logits.shape[-1] if axis else 0
    return cast(Any, _SoftmaxParts).apply(logits, m, labels - first)


class _SoftmaxParts(Function):
    """Saves the logits alone, and backward makes one tensor of their size."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, m: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        outside = ((labels < 0) | (labels >= logits.shape[-1])).unsqueeze(-1)
        index = labels.unsqueeze(-1).masked_fill(outside, 0)
        ctx.save_for_backward(logits, m, index, outside)
        z = (logits - m.unsqueeze(-1)).exp_().sum(-1)
        t = (logits.gather(-1, index) - m.unsqueeze(-1)).masked_fill(outside, 0).squeeze(-1)
        return z, t

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        g_z, g_t = grad_outputs
        logits, m, index, outside = cast(tuple[Tensor, ...], ctx.saved_tensors)
        gradient = (logits - m.unsqueeze(-1)).exp_().mul_(g_z.unsqueeze(-1))
        gradient.scatter_add_(-1, index, g_t.unsqueeze(-1).masked_fill(outside, 0))
        return gradient.to(logits.dtype), None, None


def token_loss(z: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    """Σ log z − t over tokens with label ≥ 0, 0-dim; the others add nothing to value or gradient."""
    return (z.log() - t).masked_fill(labels < 0, 0).sum()


def count_valid(labels: Tensor) -> Tensor:
    """The number of labels ≥ 0, int64, 0-dim, where the labels are."""
    return (labels >= 0).sum()


def sum_squares(*tensors: Tensor) -> Tensor:
    """Sum of squares of all elements, 0-dim, float32 at least."""
    norms: list[Tensor] = [_vector_norm(tensor, dtype=_wide(tensor.dtype)) for tensor in tensors]
    return torch.stack(norms).square().sum()


def clip_scale(norm: Tensor, limit: float) -> Tensor:
    """The factor, at most 1, that brings a gradient of this norm to `limit` (as torch.nn.utils.clip_grad_norm_)."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)
