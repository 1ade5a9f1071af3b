"""The ops of transformers by their definitions, in plain torch: every oracle of the tests uses
these.

Nothing of scalec is imported here, and no fused op of torch is used.
`tests/test_reference_ops.py` compares each with the function of torch or of transformers.
Non-goals: speed, and numbers that overflow.
"""

from collections.abc import Callable
from math import ceil, floor, log, pi, sqrt

import torch
from torch import Tensor


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Hendrycks and Gimpel 2016."""
    if approximate == "tanh":
        inner = (sqrt(2 / pi) * (x + 0.044715 * x**3)).tanh()
    else:
        inner = (x / sqrt(2)).erf()
    return 0.5 * x * (1 + inner)


def silu(x: Tensor) -> Tensor:
    """Elfwing et al. 2017."""
    return x / (1 + (-x).exp())


def softmax(x: Tensor, dim: int) -> Tensor:
    """Less the largest, which changes nothing but what overflows."""
    weights = (x - x.amax(dim, keepdim=True)).exp()
    return weights / weights.sum(dim, keepdim=True)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """x bounded by ±cap (Gemma Team 2024); 0 is no bound."""
    return cap * (x / cap).tanh() if cap else x


# ---- norms, over as many of the last dims as the weight has


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zhang and Sennrich 2019."""
    dims = tuple(range(-weight.ndim, 0))
    return x / (x.square().mean(dims, keepdim=True) + eps).sqrt() * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float) -> Tensor:
    """Ba et al. 2016."""
    dims = tuple(range(-weight.ndim, 0))
    y = rms_norm(x - x.mean(dims, keepdim=True), weight, eps)
    return y if bias is None else y + bias


# ---- rotary positions


def rope(x: Tensor, frequencies: Tensor, seq: int = 1) -> Tensor:
    """Turns each pair (x[i], x[i + d/2]) by its position times a frequency (Su et al. 2021).

    A pair is within the first d elements of the last dim: d is twice the number of frequencies.
    `seq` is the dim of positions.
    """
    turned_size = 2 * len(frequencies)
    angle = torch.outer(torch.arange(x.shape[seq]).double(), frequencies)
    angle = angle.reshape([x.shape[seq] if i == seq else 1 for i in range(x.ndim - 1)] + [-1])
    first, second = x[..., :turned_size].chunk(2, -1)
    new_first = first * angle.cos() - second * angle.sin()
    new_second = second * angle.cos() + first * angle.sin()
    return torch.cat([new_first, new_second, x[..., turned_size:]], -1)


def rope_frequencies(size: int, theta: float) -> Tensor:
    """θ^(−2i/size), one for each pair of `size` elements."""
    return theta ** (-torch.arange(0, size, 2).double() / size)


def llama3_frequencies(
    frequencies: Tensor, factor: float, low: float, high: float, original: float
) -> Tensor:
    """Grattafiori et al. 2024: a wavelength above original / low grows by the factor, one below
    original / high does not, and there is a line between the two.
    """
    wavelengths = 2 * pi / frequencies
    kept = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / factor


def yarn_frequencies(
    frequencies: Tensor, theta: float, factor: float, low: float, high: float, original: float
) -> Tensor:
    """Peng et al. 2023: a pair that turns at most `low` times in `original` positions turns
    slower by the factor, one that turns `high` times does not; steps lie between whole pairs.
    """
    size = 2 * len(frequencies)
    bounds = [size * log(original / (turns * 2 * pi)) / (2 * log(theta)) for turns in (high, low)]
    first, last = max(floor(bounds[0]), 0), min(ceil(bounds[1]), size - 1)
    pairs = torch.arange(size // 2).double()
    ramp = ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)
    return torch.lerp(frequencies, frequencies / factor, ramp)


# ---- attention


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    softcap: float = 0,
    window: int = 0,
    documents: Tensor | None = None,
    change_weights: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Softmax attention of [rows, seq, heads, head_dim] (Vaswani et al. 2017).

    Head i of q attends to head i // (heads / kv_heads) of k and v (Ainslie et al. 2023).  A query
    sees keys that are less than `window` away, and those that have its id in `documents`,
    [rows, seq].  `change_weights` gets the weights [rows, heads, query, key]: dropout.
    """
    heads, kv_heads, seq = q.shape[2], k.shape[2], q.shape[1]
    kv_head = torch.arange(heads) // (heads // kv_heads)
    scores = torch.einsum("rind,rjnd->rnij", q, k[:, :, kv_head])
    scores = soft_cap(scores * (scale or q.shape[-1] ** -0.5), softcap)
    distance = torch.arange(seq)[:, None] - torch.arange(seq)
    seen = distance.abs() < (window or seq)
    if causal:
        seen = seen & (distance >= 0)
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    weights = softmax(scores.masked_fill(~seen, -torch.inf), -1)
    if change_weights:
        weights = change_weights(weights)
    return torch.einsum("rnij,rjnd->rind", weights, v[:, :, kv_head])


# ---- loss


def cross_entropy(
    logits: Tensor, labels: Tensor, smoothing: float = 0, z: float = 0, cap: float = 0
) -> Tensor:
    """The sum over labels that are not negative.

    `smoothing` is of labels (Szegedy et al. 2016), `z` the factor of log² Z (Chowdhery et al.
    2022), `cap` bounds logits.
    """
    logits = soft_cap(logits, cap)
    log_z = logits.logsumexp(-1)
    target = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    if smoothing:  # without it a logit may be -∞, and so would their mean
        target = (1 - smoothing) * target + smoothing * logits.mean(-1)
    return (log_z - target + z * log_z.square())[labels >= 0].sum()
