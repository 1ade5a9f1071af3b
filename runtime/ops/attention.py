"""Attention by torch's own kernels and ops, and rotary positions, on local tensors."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F

from ..comm.mesh import Axis, Mesh
from ..comm.positions import Positions
from .deterministic import attention as deterministic_attention
from .dropout import dropout as dropped
from .plain_attention import pad_last_dim, wide


def rope_frequencies(
    seq: int,
    dim: int,
    theta: float,
    mesh: Mesh,
    dtype: torch.dtype = torch.float32,
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none",
    factor: float = 1.0,
    low: float = 1.0,
    high: float = 4.0,
    original: float = 8192.0,
    positions: Positions | None = None,
    seq_dim: int = -3,
) -> Tensor:
    """Cosines and signed sines of rotary positions, [2, seq, 1, dim], for `rope`
    (arXiv:2104.09864).

    `seq_dim` is the dim of the sequence in the tensors to rotate, counted from their end: for -4
    the table is [2, seq, 1, 1, dim].  With `positions` it has rows of these alone, [2, local, …].
    `scaling` slows rotations down by `factor`.  linear: all of them (arXiv:2306.15595).  llama3:
    pairs that turn less than `low` times over `original` positions; pairs that turn more than
    `high` times are not slowed down, and pairs in between in part (arXiv:2407.21783, section
    3.4.1).  yarn: likewise, in equal steps between whole pairs (arXiv:2309.00071, section 3.2).
    """
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=mesh.device) / dim)
    if scaling != "none":
        turns = original * frequency / (2 * math.pi)
        if scaling == "llama3":
            unscaled = ((turns - low) / (high - low)).clamp(0, 1)
        elif scaling == "yarn":
            unscaled = _yarn_unscaled(frequency, dim, theta, low, high, original)
        else:
            unscaled = torch.zeros_like(turns)
        frequency = frequency * (unscaled + (1 - unscaled) / factor)
    assert positions is None or positions.size == seq, "rope: positions of another sequence"
    if positions is None:
        places = torch.arange(seq, device=mesh.device)
    else:
        places = positions.indices(mesh.device)
    angle = places.double().outer(frequency)
    sine = angle.sin()
    table = torch.stack([angle.cos().repeat(1, 2), torch.cat([-sine, sine], dim=1)])
    return table.to(dtype).view(2, len(places), *[1] * (-2 - seq_dim), dim)


def _yarn_unscaled(
    frequency: Tensor, dim: int, theta: float, low: float, high: float, original: float
) -> Tensor:
    """The share of each pair's rotation that yarn leaves unscaled, [dim / 2], float64."""
    # the numbers of the pairs, as fractions, that turn `high` and `low` times
    often = dim / 2 * math.log(original / (2 * math.pi * high), theta)
    seldom = dim / 2 * math.log(original / (2 * math.pi * low), theta)
    first, last = max(math.floor(often), 0), min(math.ceil(seldom), dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float64, device=frequency.device)
    return 1 - ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)


def rope(x: Tensor, table: Tensor) -> Tensor:
    """Rotary positions: rotates (x[i], x[i + d/2]) of the last dim, or of its first d, by a
    table's angles.
    """
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
    """softmax(cap(q·kᵀ · scale) + mask)·v of [batch, seq, heads, head_dim], or as `layout` orders
    these.

    k and v may have fewer heads: head i of q attends to head i // (n / k) of k.  A query sees keys
    less than `window` away, 0 for all, with `causal` none ahead, and only keys of its own document,
    by the ids `documents` [s, b] or [b, s].  scale is d^-1/2 by default; softcap c is c ·
    tanh(x / c), 0 none.

    v may have another last dim than q and k, which the result has.  Torch's attention for CPUs has
    one for all: there the narrower are padded with zeros.

    With `positions`, q has queries of these alone, and k, v and documents are of all; so each chunk
    of a causal sequence is a call on a prefix of the keys.

    With `draws`, a share `dropout` of the weights is dropped, as `dropout` drops; `heads` is the
    axis that shards heads.  Then, and with a softcap, all weights are in memory: n · b · s² of
    them, several times over, and as many for backward.

    A window makes a mask of s² bytes, documents one of b · s² bytes, which each layer keeps for its
    backward; torch has no flash attention with a mask.  On CPUs and in graphs a prefix makes one
    too.

    `deterministic`: gradients have the same bits each time on GPUs too, where they else add up in
    any order.
    """
    seq = layout.index("s")
    window = window if window < k.shape[seq] else 0
    mask = seq, documents, causal, window, positions
    if not softcap and draws is None:
        return _by_kernels(q, k, v, *mask, scale, deterministic)
    split = {dim: part for dim, part in ((1, heads), (2, positions)) if part}
    drop = partial(dropped, draws=draws, p=dropout, site=site, batch=0, split=split)
    return _attention_with_all_scores(q, k, v, *mask, scale, softcap, drop)


def _by_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq: int,
    documents: Tensor | None,
    causal: bool,
    window: int,
    positions: Positions | None,
    scale: float | None,
    deterministic: bool,
) -> Tensor:
    """Attention without a soft cap and dropout, for which torch has kernels."""
    if q.shape[-1] != v.shape[-1] and not q.is_cuda:
        if scale is None:
            scale = q.shape[-1] ** -0.5
        width = max(q.shape[-1], v.shape[-1])
        operands = pad_last_dim(q, width), pad_last_dim(k, width), pad_last_dim(v, width)
        out = _by_kernels(*operands, seq, documents, causal, window, positions, scale, False)
        return out[..., : v.shape[-1]]
    deterministic = deterministic and q.is_cuda
    if positions is None:
        return _fused_attention(
            q, 0, documents, k, v, seq, documents, causal, window, scale, deterministic
        )
    fused = partial(
        _fused_attention,
        k=k,
        v=v,
        seq=seq,
        documents=documents,
        causal=causal,
        window=window,
        scale=scale,
        deterministic=deterministic,
    )
    return by_chunks(fused, q, seq, documents, positions, causal or window > 0)


def by_chunks(
    attend: Callable[[Tensor, int, Tensor | None], Tensor],
    q: Tensor,
    seq: int,
    documents: Tensor | None,
    positions: Positions,
    places_matter: bool,
) -> Tensor:
    """`attend(queries, their first position, their documents)` for each chunk of q's positions, as
    one result.

    One call does for all chunks where a mask asks for no positions.
    """
    if not places_matter:
        q_documents = documents
        if documents is not None:
            q_documents = torch.cat([documents.narrow(seq, *run) for run in positions.chunks], seq)
        return attend(q, 0, q_documents)
    outs: list[Tensor] = []
    offset = 0
    for start, length in positions.chunks:
        chunk_documents = None if documents is None else documents.narrow(seq, start, length)
        outs.append(attend(q.narrow(seq, offset, length), start, chunk_documents))
        offset += length
    if len(outs) == 1:
        return outs[0]
    return torch.cat(outs, seq)


def _fused_attention(
    q: Tensor,
    start: int,
    q_documents: Tensor | None,
    k: Tensor,
    v: Tensor,
    seq: int,
    documents: Tensor | None,
    causal: bool,
    window: int,
    scale: float | None,
    deterministic: bool,
) -> Tensor:
    """Attention by torch's kernels; the queries are at the positions from `start` on, and of the
    documents `q_documents`.
    """
    size, stop = k.shape[seq], start + q.shape[seq]
    # the keys that some query sees
    first, last = 0, size
    if window:
        first = max(start + 1 - window, 0)
    if causal:
        last = min(stop, size)
    elif window:
        last = min(stop + window - 1, size)
    if last - first < size:
        k, v = k.narrow(seq, first, last - first), v.narrow(seq, first, last - first)
        if documents is not None:
            documents = documents.narrow(seq, first, last - first)
    q, k, v = q.movedim(seq, -2), k.movedim(seq, -2), v.movedim(seq, -2)
    mask: Tensor | None = None
    aligned = q.is_cuda and not is_compiling()  # torch traces no bias that is a class of its own
    if window or documents is not None or (causal and start and not aligned):
        queries = torch.arange(start, stop, device=q.device)
        keys = torch.arange(first, last, device=q.device)
        mask = _seen(queries, keys, causal, window, q_documents, documents, seq)
    elif causal and start:
        from torch.nn.attention import bias  # which loads sympy and more: on CUDA alone

        mask = cast(Any, bias).causal_lower_right(q.shape[-2], last)
    gqa = q.shape[1] != k.shape[1]
    is_causal = causal and mask is None
    attend = deterministic_attention if deterministic else F.scaled_dot_product_attention
    out = attend(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=gqa)
    return out.movedim(-2, seq)


def _seen(
    queries: Tensor,
    keys: Tensor,
    causal: bool,
    window: int,
    q_documents: Tensor | None,
    k_documents: Tensor | None,
    seq: int,
) -> Tensor:
    """Which keys each query sees, by positions [q] and [k], and documents of both: [q, k] or
    [b, 1, q, k].
    """
    ahead = queries.unsqueeze(1) - keys
    seen = ahead >= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
    if window:
        seen = seen & (ahead.abs() < window)
    if q_documents is None or k_documents is None:
        return seen
    q_documents, k_documents = q_documents.movedim(seq, -1), k_documents.movedim(seq, -1)
    return seen & (q_documents[:, None, :, None] == k_documents[:, None, None, :])


def _attention_with_all_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq: int,
    documents: Tensor | None,
    causal: bool,
    window: int,
    positions: Positions | None,
    scale: float | None,
    cap: float,
    drop: Callable[[Tensor], Tensor],
) -> Tensor:
    """Attention that torch has no kernel for: all scores in memory, in float32 at least; `drop`
    drops weights.
    """
    keys = torch.arange(k.shape[seq], device=q.device)
    queries, q_documents = keys, documents
    if positions is not None:
        queries = positions.indices(q.device)
        if documents is not None:
            q_documents = documents.index_select(seq, queries)
    q, k, v = q.movedim(seq, -2), k.movedim(seq, -2), v.movedim(seq, -2)
    seen = _seen(queries, keys, causal, window, q_documents, documents, seq)
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q @ k.mT).to(wide(q.dtype)) * factor
    if cap:
        scores = cap * torch.tanh(scores / cap)
    weights = drop(scores.masked_fill(~seen, -torch.inf).softmax(-1).to(v.dtype))
    return (weights @ v).movedim(-2, seq)
