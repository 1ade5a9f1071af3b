"""The ops of emitted programs, on local tensors, that plain torch does not have.

Non-goals: no communication; what must be reduced over an axis is returned as a partial value and reduced in sight.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.nn import functional as F

from ..comm.mesh import Axis, Mesh
from ..comm.positions import Positions
from .deterministic import attention as deterministic_attention
from .dropout import dropout as dropped
from .plain_attention import padded, wide

exp, sigmoid, tanh = torch.exp, torch.sigmoid, torch.tanh

_vector_norm: Callable[..., Tensor] = cast(Any, torch.linalg).vector_norm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the weight's dims, inside in float32 at least (arXiv:1910.07467)."""
    return F.rms_norm(x, weight.shape, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float) -> Tensor:
    """(x − mean(x)) / sqrt(var(x) + eps) · weight + bias over the weight's dims, the last of x (arXiv:1607.06450)."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def mean_square(x: Tensor, dim: int | tuple[int, ...], size: int) -> Tensor:
    """Σ x² / size over some dims, float32 at least; of global size `size`, so P over an axis that shards them."""
    return x.to(wide(x.dtype)).square().sum(dim) / size


def rms_scaled(x: Tensor, weight: Tensor, square: Tensor, eps: float) -> Tensor:
    """x / sqrt(square + eps) · weight: `rms_norm` over the weight's dims where no rank holds all of x.

    square: the mean of x² over these, whole, for each element of the other dims.
    """
    root = (square + eps).rsqrt().view(*square.shape, *(1 for _ in weight.shape))
    return (x * root * weight).to(x.dtype)


def mean(x: Tensor, dim: int | tuple[int, ...], size: int) -> Tensor:
    """Σ x / size over some dims of global size `size`, so P over an axis that shards them."""
    return (x.sum(dim, dtype=wide(x.dtype)) / size).to(x.dtype)


def concat(*tensors: Tensor) -> Tensor:
    """Tensors concatenated along their last dims, and repeated along others in which they have size 1."""
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
    tokens: Tensor, table: Tensor, axis: Axis | None = None, lookup: Callable[..., Tensor] = F.embedding
) -> Tensor:
    """Rows of `table` [v, h]; with an axis it holds this rank's part of the vocabulary, and the result is P over it."""
    if axis is None or axis.size == 1:
        return lookup(tokens, table)
    local = tokens - axis.rank * table.shape[0]
    outside = (local < 0) | (local >= table.shape[0])
    return lookup(local.masked_fill(outside, 0), table).masked_fill(outside.unsqueeze(-1), 0)


def rope_frequencies(
    seq: int,
    dim: int,
    theta: float,
    between: int,
    mesh: Mesh,
    dtype: torch.dtype = torch.float32,
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none",
    factor: float = 1.0,
    low: float = 1.0,
    high: float = 4.0,
    original: float = 8192.0,
    positions: Positions | None = None,
) -> Tensor:
    """Cosines and signed sines of rotary positions, [2, seq, 1 × between, dim], for `rope` (arXiv:2104.09864).

    `between` is the number of dims between seq and head_dim in the tensors to rotate.  With `positions` the table has
    rows of these alone, [2, local, …].  `scaling` slows rotations down by `factor`: linear all of them
    (arXiv:2306.15595); llama3 those that turn less than `low` times over `original` positions, none that turn more than
    `high` times, and those between in part (arXiv:2407.21783, section 3.4.1); yarn likewise, in equal steps between
    whole pairs (arXiv:2309.00071, section 3.2).
    """
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=mesh.device) / dim)
    if scaling != "none":
        turns = original * frequency / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1) if scaling == "llama3" else torch.zeros_like(turns)
        if scaling == "yarn":
            often, seldom = (dim / 2 * math.log(original / (2 * math.pi * each), theta) for each in (high, low))
            first, last = max(math.floor(often), 0), min(math.ceil(seldom), dim - 1)
            pairs = torch.arange(dim // 2, device=mesh.device)
            kept = 1 - ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1).double()
        frequency = frequency * (kept + (1 - kept) / factor)
    assert positions is None or positions.size == seq, "rope: positions of another sequence"
    places = torch.arange(seq, device=mesh.device) if positions is None else positions.indices(mesh.device)
    angle = places.double().outer(frequency)
    sine = angle.sin()
    table = torch.stack([angle.cos().repeat(1, 2), torch.cat([-sine, sine], dim=1)])
    return table.to(dtype).view(2, len(places), *(1 for _ in range(between)), dim)


def rope(x: Tensor, table: Tensor) -> Tensor:
    """Rotary positions: rotates (x[i], x[i + d/2]) of the last dim, or of its first d, by a table's angles."""
    turned = table.shape[-1]
    if turned < x.shape[-1]:
        return torch.cat([rope(x[..., :turned], table), x[..., turned:]], -1)
    cosine, sine = table.unbind()
    return torch.addcmul(x * cosine, x.roll(x.shape[-1] // 2, -1), sine)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: str = "bshd",
    causal: bool = True,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    documents: Tensor | None = None,
    draws: Tensor | None = None,
    dropout: float = 0.0,
    site: int = 0,
    heads: Axis | None = None,
    positions: Positions | None = None,
    deterministic: bool = False,
) -> Tensor:
    """softmax(cap(q·kᵀ · scale) + mask)·v of [batch, seq, heads, head_dim], or as `layout` orders these.

    k and v may have fewer heads: head i of q attends to head i // (n / k) of k.  A query sees keys less than `window`
    away, 0 for all, with `causal` none ahead, and only those of its own document, by the ids `documents` [s, b] or
    [b, s].  scale is d^-1/2 by default; softcap c is c · tanh(x / c), 0 none.

    v may have another last dim than q and k, which the result has.  Torch's attention for CPUs has one for all: there
    the narrower are padded with zeros.

    With `positions`, q has queries of these alone, and k, v and documents are of all; so each chunk of a causal
    sequence is a call on a prefix of the keys.

    With `draws`, a share `dropout` of the weights is dropped, as `dropout` drops; `heads` is the axis
    over which heads are sharded.  Then, and with a softcap, all weights are in memory: n · b · s² of them, several
    times over, and as many for backward.

    A window makes a mask of s² bytes, documents one of b · s² bytes, which each layer keeps for its backward; torch has
    no flash attention with a mask.  On CPUs and in graphs a prefix makes one too.

    `deterministic`: gradients have the same bits each time on GPUs too, where they else add up in any order.
    """
    seq = layout.index("s")
    window = window if window < k.shape[seq] else 0
    if not softcap and draws is None:
        if q.shape[-1] != v.shape[-1] and not q.is_cuda:
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            width = max(q.shape[-1], v.shape[-1])
            given = padded(q, width), padded(k, width), padded(v, width), layout, causal, window, scale
            return attention(*given, documents=documents, positions=positions)[..., : v.shape[-1]]
        fused = partial(_fused, k=k, v=v, seq=seq, documents=documents, causal=causal, window=window, scale=scale)
        fused = partial(fused, deterministic=deterministic and q.is_cuda)
        if positions is None:
            return fused(q, 0, documents)
        return by_chunks(fused, q, seq, documents, positions, causal or window > 0)
    keys = torch.arange(k.shape[seq], device=q.device)
    rows = keys if positions is None else positions.indices(q.device)
    own = documents if positions is None or documents is None else documents.index_select(seq, rows)
    split = {dim: part for dim, part in ((1, heads), (2, positions)) if part}
    kept = partial(dropped, draws=draws, p=dropout, site=site, batch=0, split=split)
    q, k, v = q.movedim(seq, -2), k.movedim(seq, -2), v.movedim(seq, -2)
    seen = _seen(rows, keys, causal, window, own, documents, seq)
    return _unfused(q, k, v, seen, scale, softcap, kept).movedim(-2, seq)


def by_chunks(
    attend: Callable[[Tensor, int, Tensor | None], Tensor],
    q: Tensor,
    seq: int,
    documents: Tensor | None,
    positions: Positions,
    places_matter: bool,
) -> Tensor:
    """`attend(queries, their first position, their documents)` for each chunk of q's positions, as one result.

    One call does for all chunks where a mask asks for no positions.
    """
    if not places_matter:
        own = None if documents is None else torch.cat([documents.narrow(seq, *run) for run in positions.chunks], seq)
        return attend(q, 0, own)
    outs: list[Tensor] = []
    at = 0
    for start, length in positions.chunks:
        own = None if documents is None else documents.narrow(seq, start, length)
        outs.append(attend(q.narrow(seq, at, length), start, own))
        at += length
    return outs[0] if len(outs) == 1 else torch.cat(outs, seq)


def _fused(
    q: Tensor,
    start: int,
    own: Tensor | None,
    k: Tensor,
    v: Tensor,
    seq: int,
    documents: Tensor | None,
    causal: bool,
    window: int,
    scale: float | None,
    deterministic: bool,
) -> Tensor:
    """Attention by what torch has for it; the queries are those from `start` on, their documents `own`."""
    size, stop = k.shape[seq], start + q.shape[seq]
    first = max(start + 1 - window, 0) if window else 0
    last = min(stop if causal else stop + window - 1, size) if causal or window else size
    if last - first < size:
        k, v = k.narrow(seq, first, last - first), v.narrow(seq, first, last - first)
        documents = None if documents is None else documents.narrow(seq, first, last - first)
    q, k, v = q.movedim(seq, -2), k.movedim(seq, -2), v.movedim(seq, -2)
    mask: Tensor | None = None
    aligned = q.is_cuda and not is_compiling()  # torch traces no bias that is a class of its own
    if window or documents is not None or (causal and start and not aligned):
        rows, keys = (torch.arange(*ends, device=q.device) for ends in ((start, stop), (first, last)))
        mask = _seen(rows, keys, causal, window, own, documents, seq)
    elif causal and start:
        from torch.nn.attention import bias  # which loads sympy and more: on CUDA alone

        mask = cast(Any, bias).causal_lower_right(q.shape[-2], last)
    gqa = q.shape[1] != k.shape[1]
    is_causal = causal and mask is None
    attend = deterministic_attention if deterministic else F.scaled_dot_product_attention
    out = attend(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=gqa)
    return out.movedim(-2, seq)


def _seen(
    queries: Tensor, keys: Tensor, causal: bool, window: int, own: Tensor | None, theirs: Tensor | None, seq: int
) -> Tensor:
    """Which keys each query sees, by positions [q] and [k], and documents of both: [q, k] or [b, 1, q, k]."""
    ahead = queries.unsqueeze(1) - keys
    seen = ahead >= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
    seen = seen & (ahead.abs() < window) if window else seen
    if own is None or theirs is None:
        return seen
    own, theirs = own.movedim(seq, -1), theirs.movedim(seq, -1)
    return seen & (own[:, None, :, None] == theirs[:, None, None, :])


def _unfused(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None, cap: float, kept: Callable[[Tensor], Tensor]
) -> Tensor:
    """Attention for which torch has no kernel: all scores in memory, in float32 at least; `kept` drops weights."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.mT).to(wide(q.dtype)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = cap * torch.tanh(scores / cap) if cap else scores
    return kept(scores.masked_fill(~seen, -torch.inf).softmax(-1).to(v.dtype)) @ v


def cross_entropy(
    logits: Tensor, labels: Tensor, classes: int | None = None, smoothing: float = 0.0, z: float = 0.0
) -> Tensor:
    """Sum of token losses, 0-dim, float32 at least.  logits [..., v], labels [...]; labels < 0 are ignored.

    The first `classes` columns of v are classes, by default all; the others are padding, of probability 0.  A share
    `smoothing` of each label goes to all classes alike (arXiv:1512.00567); z · (log Σ exp(logits))² is added
    (arXiv:2204.02311).
    """
    if smoothing or z:
        peak = max_logit(logits, classes=classes)
        parts = local_softmax_stats(logits, peak, labels, classes=classes, smoothing=smoothing)
        return token_loss(*parts, labels, peak if z else None, z)
    logits = logits[..., :classes].flatten(0, -2).to(wide(logits.dtype))
    return F.cross_entropy(logits, labels.flatten().clamp(min=-1), ignore_index=-1, reduction="sum")


def max_logit(logits: Tensor, axis: Axis | None = None, classes: int | None = None) -> Tensor:
    """The largest logit [...] of [..., v], float32 at least, without gradient; max-partial over a sharded v.

    Only the first `classes` columns of the full vocabulary are real, by default all; the rest is padding.
    """
    return _real(logits, axis, classes).detach().amax(-1).to(wide(logits.dtype))


def _real(logits: Tensor, axis: Axis | None, classes: int | None) -> Tensor:
    """This rank's logits without those that are padding."""
    if classes is None:
        return logits
    first = axis.rank * logits.shape[-1] if axis else 0
    return logits[..., : classes - first]


def local_softmax_stats(
    logits: Tensor,
    m: Tensor,
    labels: Tensor,
    axis: Axis | None = None,
    classes: int | None = None,
    smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """z = Σ exp(logit − m) and t = the label's logit − m, or 0 for a label elsewhere, both [...]; P over the axis of v.

    m is taken as constant: its gradients through z and through `token_loss` cancel.  The first `classes` of the v of
    all ranks of the axis are classes, by default all.  With `smoothing` s, t is (1 − s) of that and s of
    Σ (logit − m) / classes.
    """
    size = logits.shape[-1]
    first, every = (axis.rank * size, axis.size * size) if axis else (0, size)
    each = smoothing / (every if classes is None else classes)
    return cast(Any, _SoftmaxParts).apply(_real(logits, axis, classes), m, labels - first, smoothing, each)


class _SoftmaxParts(Function):
    """Saves the logits alone, and backward makes one tensor of their size."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, m: Tensor, labels: Tensor, smoothing: float, each: float
    ) -> tuple[Tensor, Tensor]:
        outside = ((labels < 0) | (labels >= logits.shape[-1])).unsqueeze(-1)
        index = labels.unsqueeze(-1).masked_fill(outside, 0)
        ctx.save_for_backward(logits, m, index, outside)
        ctx.smoothing, ctx.each = smoothing, each
        below = logits - m.unsqueeze(-1)
        t = (logits.gather(-1, index) - m.unsqueeze(-1)).masked_fill(outside, 0).squeeze(-1)
        if smoothing:
            t = (1 - smoothing) * t + each * below.sum(-1)
        return below.exp_().sum(-1), t

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        g_z, g_t = grad_outputs
        logits, m, index, outside = cast(tuple[Tensor, ...], ctx.saved_tensors)
        gradient = (logits - m.unsqueeze(-1)).exp_().mul_(g_z.unsqueeze(-1))
        if ctx.smoothing:
            gradient.add_(g_t.unsqueeze(-1), alpha=ctx.each)
            g_t = (1 - ctx.smoothing) * g_t
        gradient.scatter_add_(-1, index, g_t.unsqueeze(-1).masked_fill(outside, 0))
        return gradient.to(logits.dtype), None, None, None, None


def token_loss(z: Tensor, t: Tensor, labels: Tensor, m: Tensor | None = None, z_loss: float = 0.0) -> Tensor:
    """Σ log z − t over tokens with label ≥ 0, 0-dim; the others add nothing to value or gradient.

    m: the value subtracted from the logits, as in `local_softmax_stats`; with it, z_loss · (log z + m)² is added
    (arXiv:2204.02311).
    """
    log = z.log()
    loss = log - t if m is None else log - t + z_loss * (log + m).square()
    return loss.masked_fill(labels < 0, 0).sum()


def count_valid(labels: Tensor) -> Tensor:
    """The number of labels ≥ 0, int64, 0-dim, where the labels are."""
    return (labels >= 0).sum()


def sum_squares(*tensors: Tensor, once: Axis | None = None) -> Tensor:
    """Sum of squares of all elements, 0-dim, float32 at least; zero but on the first of the ranks of `once`."""
    norms: list[Tensor] = [_vector_norm(tensor, dtype=wide(tensor.dtype)) for tensor in tensors]
    squares = torch.stack(norms).square().sum()
    return squares if once is None or once.rank == 0 else torch.zeros_like(squares)


def clip_scale(norm: Tensor, limit: float) -> Tensor:
    """The factor, at most 1, that brings a gradient of this norm to `limit` (as torch.nn.utils.clip_grad_norm_)."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)
