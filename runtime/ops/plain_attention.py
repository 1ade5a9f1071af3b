"""Attention in plain torch, in chunks of queries: the kernels' twin, which saves the same tensors.

In float64 for float64, else in float32, whatever q, k and v are in.  Tensors are [s, b, n, d] with
seq 0, [b, s, n, d] with seq 1; v and the result may have another last dim than q and k; rows of
numbers are [b, n, s].  Letters of dims: b samples, h heads of keys, g heads of queries for each, q
queries, k keys, d.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

_QUERIES = 256
"""How many queries have their scores in memory at a time."""

Saved = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor]
"""Saved for backward: q, k, v, the documents of queries and of keys, the result and its
log-sum-exp.
"""


@dataclass(frozen=True)
class Setting:
    """The query of row r is at r + shift among the keys, and sees keys from `back` behind this
    place to `forth` ahead of it.

    back or forth -1 is no limit, cap 0 is no soft cap.
    """

    seq: int
    scale: float
    back: int
    forth: int
    cap: float = 0.0
    shift: int = 0


def sizes(x: Tensor, seq: int) -> tuple[int, int, int]:
    """Batch, sequence and heads."""
    return x.shape[1 - seq], x.shape[seq], x.shape[2]


def across(rows: Tensor, seq: int) -> Tensor:
    """Rows [b, n, s] as a factor of tensors that lie in the layout."""
    return rows.movedim(-1, seq).unsqueeze(-1)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ids: Tensor | None,
    k_ids: Tensor | None,
    how: Setting,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The result in `dtype`, by default q's, with q's rows, and its log-sum-exp, float32 at
    least, [b, n, s].
    """
    batch, queries, heads = sizes(q, how.seq)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)
    lse = q.new_empty((batch, heads, queries), dtype=wide(q.dtype))
    q_heads, k_heads, v_heads = _queries(q, k, how), _keys(k, how), _keys(v, how)
    out_heads, lse_heads = _queries(out, k, how), lse.view(*q_heads.shape[:-1])
    for rows, columns, pairs in _parts(q, k, q_ids, k_ids, how):
        scores = _scores(q_heads[..., rows, :], k_heads[..., columns, :], how).masked_fill(
            ~pairs, -torch.inf
        )
        lse_heads[..., rows] = sums = scores.logsumexp(-1)
        weights = (scores - _finite(sums)).exp()
        out_heads[..., rows, :] = torch.einsum(
            "bhgqk,bhkd->bhgqd", weights, _to_wide(v_heads[..., columns, :])
        )
    return out, lse


def backward(
    saved: Saved, g_out: Tensor, how: Setting, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, each as it is shaped, in `dtype`, by default its own."""
    q, k, v, q_ids, k_ids, out, lse = saved
    q_heads, k_heads, v_heads, g_heads = (
        _queries(q, k, how),
        _keys(k, how),
        _keys(v, how),
        _queries(g_out, k, how),
    )
    lse_heads = lse.view(*q_heads.shape[:-1])
    delta = (_to_wide(g_heads) * _queries(out, k, how)).sum(-1)
    g_q, g_k, g_v = (
        torch.zeros(operand.shape, dtype=wide(q.dtype), device=q.device) for operand in (q, k, v)
    )
    for rows, columns, pairs in _parts(q, k, q_ids, k_ids, how):
        q_part, g_part = _to_wide(q_heads[..., rows, :]), _to_wide(g_heads[..., rows, :])
        k_part, v_part = _to_wide(k_heads[..., columns, :]), _to_wide(v_heads[..., columns, :])
        scores = _scores(q_part, k_part, how)
        weights = (scores - _finite(lse_heads[..., rows])).exp().masked_fill(~pairs, 0)
        _keys(g_v, how)[..., columns, :] += torch.einsum("bhgqk,bhgqd->bhkd", weights, g_part)
        g_weights = torch.einsum("bhgqd,bhkd->bhgqk", g_part, v_part)
        g_scores = how.scale * weights * (g_weights - delta[..., rows].unsqueeze(-1))
        if how.cap:
            g_scores = g_scores * (1 - (scores / how.cap).square())
        _keys(g_k, how)[..., columns, :] += torch.einsum("bhgqk,bhgqd->bhkd", g_scores, q_part)
        _queries(g_q, k, how)[..., rows, :] = torch.einsum("bhgqk,bhkd->bhgqd", g_scores, k_part)
    return g_q.to(dtype or q.dtype), g_k.to(dtype or k.dtype), g_v.to(dtype or v.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def pad_last_dim(x: Tensor, width: int) -> Tensor:
    """x with zeros after its last dim, up to a width."""
    if x.shape[-1] == width:
        return x
    return pad(x, (0, width - x.shape[-1]))


def _to_wide(x: Tensor) -> Tensor:
    return x.to(wide(x.dtype))


def _keys(x: Tensor, how: Setting) -> Tensor:
    """k or its like as [b, h, k, d], a view."""
    return x.movedim(how.seq, -2)


def _queries(x: Tensor, k: Tensor, how: Setting) -> Tensor:
    """q or its like as [b, h, g, q, d], a view."""
    x = x.movedim(how.seq, -2)
    return x.view(x.shape[0], k.shape[2], x.shape[1] // k.shape[2], *x.shape[2:])


def _scores(q: Tensor, k: Tensor, how: Setting) -> Tensor:
    products: Tensor = torch.einsum("bhgqd,bhkd->bhgqk", _to_wide(q), _to_wide(k))
    scores = products * how.scale
    if not how.cap:
        return scores
    return torch.tanh(scores / how.cap) * how.cap


def _finite(lse: Tensor) -> Tensor:
    """[..., 1], with 0 for queries that see nothing."""
    return lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)


def _parts(
    q: Tensor, k: Tensor, q_ids: Tensor | None, k_ids: Tensor | None, how: Setting
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Some queries, the keys that one of them may see, and which sees which: [q, k], or [b, 1,
    1, q, k].
    """
    queries, keys = q.shape[how.seq], k.shape[how.seq]
    for first in range(0, queries, _QUERIES):
        last = min(first + _QUERIES, queries)
        start, stop = 0, keys
        if how.back >= 0:
            start = max(first + how.shift - how.back, 0)
        if how.forth >= 0:
            stop = max(min(last + how.shift + how.forth, keys), 0)
        rows, columns = slice(first, last), slice(min(start, stop), stop)
        pairs = _seen(rows, columns, how, q.device)
        if q_ids is not None and k_ids is not None:
            q_documents, k_documents = (ids.movedim(how.seq, -1) for ids in (q_ids, k_ids))
            pairs = pairs & (
                q_documents[:, None, None, rows, None] == k_documents[:, None, None, None, columns]
            )
        yield rows, columns, pairs


def _seen(rows: slice, columns: slice, how: Setting, device: torch.device) -> Tensor:
    places = torch.arange(rows.start + how.shift, rows.stop + how.shift, device=device)
    ahead = places.unsqueeze(1) - torch.arange(columns.start, columns.stop, device=device)
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if how.back >= 0:
        seen = seen & (ahead <= how.back)
    if how.forth >= 0:
        seen = seen & (ahead >= -how.forth)
    return seen
