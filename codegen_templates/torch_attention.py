"""Rotary positions and attention on DTensors, for programs of torch alone (`torch_ops`)."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from .torch_ops import counted, on_each_rank, placed, wide, zigzag_order


def rope_frequencies(
    mesh: DeviceMesh,
    seq: int,
    dim: int,
    theta: float,
    placements: Sequence[Placement],
    dtype: torch.dtype = torch.float32,
    scaling: str = "none",
    factor: float = 1.0,
    low: float = 1.0,
    high: float = 4.0,
    original: float = 8192.0,
    zigzag: int = 1,
    seq_dim: int = -3,
) -> Tensor:
    """Cosines and signed sines of rotary positions, [2, seq, 1, dim], for `rope`.

    `seq_dim` is the dim of the sequence in the tensors to rotate, counted from their end: for -4 the table is
    [2, seq, 1, 1, dim].
    """
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if scaling != "none":
        turns = original * frequency / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1) if scaling == "llama3" else torch.zeros_like(turns)
        if scaling == "yarn":
            often, seldom = (dim / 2 * math.log(original / (2 * math.pi * each), theta) for each in (high, low))
            first, last = max(math.floor(often), 0), min(math.ceil(seldom), dim - 1)
            pairs = torch.arange(dim // 2, dtype=torch.float64)
            kept = 1 - ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)
        frequency = frequency * (kept + (1 - kept) / factor)
    angle = zigzag_order(seq, zigzag).double().outer(frequency)
    table = torch.stack([angle.cos().repeat(1, 2), torch.cat([-angle.sin(), angle.sin()], dim=1)])
    return placed(table.to(dtype).view(2, seq, *[1] * (-2 - seq_dim), dim), mesh, placements)


def rope(x: Tensor, table: Tensor) -> Tensor:
    """Rotates (x[i], x[i + d/2]) of the last dim, or of its first d, by the angles of a table."""
    turned = table.shape[-1]
    if turned < x.shape[-1]:
        return torch.cat([rope(x[..., :turned], table), x[..., turned:]], -1)
    cosine, sine = table.unbind()
    return x * cosine + x.roll(x.shape[-1] // 2, -1) * sine


class Scores(NamedTuple):
    """How queries see keys: both are numbered in the `order` that ranks have positions in.  documents: [batch, seq]."""

    order: Tensor
    documents: Tensor | None
    causal: bool
    window: int
    scale: float | None
    softcap: float

    def seen(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Whether queries see keys, [rows, columns]; [batch, 1, rows, columns] where there are documents."""
        ahead = self.order[rows].unsqueeze(1) - self.order[columns]
        seen = ahead >= 0 if self.causal else torch.ones_like(ahead, dtype=torch.bool)
        seen = seen & (ahead.abs() < self.window) if self.window else seen
        if self.documents is None:
            return seen
        return seen & (self.documents[:, None, rows, None] == self.documents[:, None, None, columns])

    def __call__(self, q: Tensor, k: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """cap(q·kᵀ · scale), −∞ where a key isn't seen: [batch, heads, rows, columns]."""
        scores = (q @ for_each_head(k, q).mT).to(wide(q)) * (q.shape[-1] ** -0.5 if self.scale is None else self.scale)
        scores = self.softcap * torch.tanh(scores / self.softcap) if self.softcap else scores
        return scores.masked_fill(~self.seen(rows, columns), -torch.inf)


def for_each_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values of few heads, [batch, kv heads, seq, d], repeated for each head of the queries."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


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
    zigzag: int = 1,
) -> Tensor:
    """softmax(cap(q·kᵀ · scale) + mask)·v on each rank's heads, samples and queries."""
    seq = layout.index("s")
    of = partial(Scores, causal=causal, window=window, scale=scale, softcap=softcap)
    operands = [q, k, v, counted(q, seq), *([] if documents is None else [documents])]
    attend = partial(attend_locally, seq=seq, of=of, zigzag=zigzag)
    return on_each_rank(attend, cast(DTensor, q).placements, *operands)


def attend_locally(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    documents: Tensor | None = None,
    *,
    seq: int,
    of: Callable[..., Scores],
    zigzag: int,
) -> Tensor:
    """Attention of the queries that are number `rows` to all keys."""
    q, k, v = (x.movedim(seq, -2) for x in (q, k, v))
    of_rows = None if documents is None else documents.movedim(seq, -1)
    scores = of(zigzag_order(k.shape[-2], zigzag).to(k.device), of_rows)
    columns = torch.arange(k.shape[-2], device=k.device)
    if scores.softcap:
        return (scores(q, k, rows, columns).softmax(-1).to(v.dtype) @ for_each_head(v, q)).movedim(-2, seq)
    special = scores.window or documents is not None
    plain = scores.causal and not special and len(rows) == len(columns) and zigzag == 1
    mask = scores.seen(rows, columns) if special or (scores.causal and not plain) else None
    how: dict[str, Any] = {"is_causal": plain, "scale": scores.scale, "enable_gqa": q.shape[1] > k.shape[1]}
    return nn.functional.scaled_dot_product_attention(q, k, v, mask, **how).movedim(-2, seq)
