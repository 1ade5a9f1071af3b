"""Attention over a sequence that an axis shards: keys and values go around the ring of its ranks
(arXiv:2310.01889).

On hop i rank r has the keys of rank r − i, while the keys of the next hop are under way.  Results
of hops are merged by their log-sum-exp; backward needs only the final one, since each pair's weight
is exp(score − log-sum-exp).

On n ranks, with h hops after the first, every rank begins these calls in this order:

forward   h rotations of keys and values by 1
backward  h times: a rotation of keys and values by 1, one of gradients by 1; then one of gradients
          by −h

Without a window h is n − 1.  With one it is the hop of the furthest keys that any rank sees: 0 for
a window of 1; for a causal sequence in contiguous parts of c positions min(n − 1, ⌈(window − 1) /
c⌉); else n − 1.  A rotation sends a flat tensor, k and then v or their gradients, as long as both
together; gradients in float32, or float64 for float64.  Where h is 0 there is no call.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_compiling

from ..comm.collectives import rotate
from ..comm.mesh import Axis
from ..comm.positions import chunks
from . import flash_attention, plain_attention
from .attention import attention
from .deterministic import deterministic as kernels_in_order
from .plain_attention import Setting, across, sizes, wide

Chunks = tuple[tuple[int, int], ...]


class Backend(NamedTuple):
    """Forward and backward of attention to some keys, as `plain_attention` has them."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


class Call(NamedTuple):
    """Some of a rank's queries (`rows`) against some of the keys that it has (`columns`): the first
    of each, and how many.

    shift: how far the first query is behind the first key.  masked: whether the mask hides any of
    the pairs.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    shift: int
    masked: bool


PLAIN = Backend(plain_attention.forward, plain_attention.backward)
FLASH = Backend(flash_attention.forward, flash_attention.backward)
FLASH_IN_ORDER = Backend(flash_attention.forward, kernels_in_order()(flash_attention.backward))


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis,
    layout: str = "bshd",
    causal: bool = True,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    documents: Tensor | None = None,
    zigzag: bool = False,
    deterministic: bool = False,
    backend: Backend = PLAIN,
) -> Tensor:
    """`attention` where q, k and v have this rank's part of a sequence that `axis` shards,
    contiguous or `zigzag`.

    `documents` are of the whole sequence.  Saves q, k, v, the result and its log-sum-exp, all of
    this rank's part.  torch's flash attention does the calls that it takes, `backend` the others.
    `deterministic`: with the same bits each time, on GPUs too.  Not for graphs.
    """
    if axis.size == 1:
        return attention(
            q, k, v, layout, causal, window, scale, softcap, documents, deterministic=deterministic
        )
    assert not is_compiling(), "ring_attention: a ring cannot be in a graph"
    seq = layout.index("s")
    size = q.shape[seq] * axis.size
    parts = tuple(chunks(size, ((axis.size, rank, zigzag),)) for rank in range(axis.size))
    assert documents is None or documents.shape[seq] == size, "ring_attention: documents of a part"
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    backends = FLASH_IN_ORDER if deterministic else FLASH, backend
    if window >= size:
        window = 0
    how = _Ring(axis, parts, causal, window, Setting(seq, factor, -1, -1, softcap), *backends)
    return cast(Any, _RingAttention).apply(q, k, v, documents, how)


@cache
def calls(q_chunks: Chunks, k_chunks: Chunks, causal: bool, window: int) -> tuple[Call, ...]:
    """The calls for queries at `q_chunks` and keys at `k_chunks`, one for each two chunks that see
    each other.

    Neighbouring calls without a mask are joined.  So are a rank's queries and its own keys where
    the mask only hides keys ahead.
    """
    if q_chunks == k_chunks and causal and not window:
        whole = (0, sum(length for _, length in q_chunks))
        return (Call(whole, whole, 0, True),)
    # the distances of a query from the keys that it sees, positive for keys behind it
    least, most = -inf, inf
    if window:
        least, most = 1 - window, window - 1
    if causal:
        least = 0
    unmerged: list[Call] = []
    for columns, first_key in _runs_with_places(k_chunks):
        for rows, first in _runs_with_places(q_chunks):
            shift = first - first_key
            nearest, furthest = shift - columns[1] + 1, shift + rows[1] - 1
            if furthest >= least and nearest <= most:
                unmerged.append(Call(rows, columns, shift, nearest < least or furthest > most))
    return tuple(_join_neighbours(_join_neighbours(unmerged)))


def _runs_with_places(runs: Chunks) -> Iterator[tuple[tuple[int, int], int]]:
    """Each run's place among a rank's positions, and its first position."""
    offset = 0
    for start, length in runs:
        yield (offset, length), start
        offset += length


def _join_neighbours(unmerged: Sequence[Call]) -> list[Call]:
    """Calls one after another, neighbours without a mask as one."""
    merged: list[Call] = []
    for call in unmerged:
        last = merged[-1] if merged else call
        if not last.masked and not call.masked:
            if last.columns == call.columns and sum(last.rows) == call.rows[0]:
                call = merged.pop()._replace(rows=(last.rows[0], last.rows[1] + call.rows[1]))
            elif last.rows == call.rows and sum(last.columns) == call.columns[0]:
                call = merged.pop()._replace(
                    columns=(last.columns[0], last.columns[1] + call.columns[1])
                )
        merged.append(call)
    return merged


@cache
def hops(parts: tuple[Chunks, ...], causal: bool, window: int) -> int:
    """The last hop that brings any rank keys that its queries see."""
    ranks = range(len(parts))
    for hop in reversed(ranks):
        if any(calls(parts[r], parts[r - hop], causal, window) for r in ranks):
            return hop
    raise AssertionError("ring_attention: no query sees a key")


@dataclass(frozen=True)
class _Ring:
    """A ring as this rank goes through it.  parts: each rank's positions; how: the setting of a
    call without a mask.
    """

    axis: Axis
    parts: tuple[Chunks, ...]
    causal: bool
    window: int
    how: Setting
    flash: Backend
    backend: Backend

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The result, in q's dtype, and its log-sum-exp."""
        batch, queries, heads = sizes(q, self.how.seq)
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=wide(q.dtype))
        lse = out.new_full((batch, heads, queries), -torch.inf)
        for hop, (keys, values) in enumerate(self._around(k, v)):
            for call, ids, how in self._calls(hop, documents):
                operands = (
                    self._rows(q, call.rows),
                    self._rows(keys, call.columns),
                    self._rows(values, call.columns),
                )
                totals = self._rows(out, call.rows), lse.narrow(-1, *call.rows)
                forward = self._find_backend(*operands, ids, how).forward
                # The further results have no name, so that their memory is free after the merge.
                _merge(*totals, *forward(*operands, *ids, how, dtype=out.dtype), how.seq)
        return out.to(q.dtype), lse

    def backward(
        self, saved: Sequence[Tensor], documents: Tensor | None, g_out: Tensor
    ) -> tuple[Tensor, ...]:
        """Gradients of q, k and v, in their dtypes."""
        q, k, v, out, lse = saved
        last = hops(self.parts, self.causal, self.window)
        g_q = q.new_zeros(q.shape, dtype=wide(q.dtype))
        sent = arriving = g_q.new_empty(0)
        work: Any = None
        for hop, (keys, values) in enumerate(self._around(k, v)):
            flat = g_q.new_zeros(k.numel() + v.numel())
            g_k, g_v = _unpack(flat, k, v)
            for call, ids, how in self._calls(hop, documents):
                rows, columns = call.rows, call.columns
                operands = (
                    self._rows(q, rows),
                    self._rows(keys, columns),
                    self._rows(values, columns),
                )
                saved_here = (
                    *operands,
                    *ids,
                    self._rows(out, rows),
                    lse.narrow(-1, *rows).contiguous(),
                )
                back = self._find_backend(*operands, ids, how).backward
                totals = self._rows(g_q, rows), self._rows(g_k, columns), self._rows(g_v, columns)
                _add(totals, back(saved_here, self._rows(g_out, rows), how, dtype=g_q.dtype))
            if hop:
                work.wait()
                flat += arriving
            sent = flat
            if last:
                arriving = torch.empty_like(sent)
                work = rotate(sent, arriving, self.axis, 1 if hop < last else -last)
        if last:
            work.wait()
            sent = arriving
        g_k, g_v = _unpack(sent, k, v)
        return g_q.to(q.dtype), g_k.to(k.dtype), g_v.to(v.dtype)

    def _around(self, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The keys and values of each hop; the next hop's are under way until it is asked for."""
        last = hops(self.parts, self.causal, self.window)
        here = torch.cat([k.flatten(), v.flatten()])
        there = torch.empty_like(here) if last else here
        for hop in range(last + 1):
            work = rotate(here, there, self.axis, 1) if hop < last else None
            yield _unpack(here, k, v)
            if work is not None:
                work.wait()
            here, there = there, here

    def _calls(
        self, hop: int, documents: Tensor | None
    ) -> Iterator[tuple[Call, tuple[Tensor | None, Tensor | None], Setting]]:
        """The calls of a hop, each with documents of its queries and keys, and its setting."""
        q_chunks, k_chunks = self.parts[self.axis.rank], self.parts[self.axis.rank - hop]
        back = self.window - 1
        limited = replace(self.how, back=back, forth=0 if self.causal else back)
        q_ids, k_ids = (self._documents(documents, part) for part in (q_chunks, k_chunks))
        for call in calls(q_chunks, k_chunks, self.causal, self.window):
            ids: tuple[Tensor | None, Tensor | None] = (None, None)
            if q_ids is not None and k_ids is not None:
                ids = self._rows(q_ids, call.rows), self._rows(k_ids, call.columns)
            how = self.how
            if call.masked:
                how = replace(limited, shift=call.shift)
            yield call, ids, how

    def _find_backend(
        self, q: Tensor, k: Tensor, v: Tensor, ids: tuple[Tensor | None, ...], how: Setting
    ) -> Backend:
        return self.flash if flash_attention.takes(q, k, v, ids[0], how) else self.backend

    def _documents(self, documents: Tensor | None, part: Chunks) -> Tensor | None:
        if documents is None:
            return None
        return torch.cat([self._rows(documents, run) for run in part], self.how.seq)

    def _rows(self, x: Tensor, run: tuple[int, int]) -> Tensor:
        return x.narrow(self.how.seq, *run)


class _RingAttention(Function):
    """Saves what attention saves, of this rank's part."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, ring: _Ring
    ) -> Tensor:
        out, lse = ring.forward(q, k, v, documents)
        ctx.save_for_backward(q, k, v, out, lse, documents)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        *saved, documents = ctx.saved_tensors
        return *ctx.ring.backward(saved, documents, grad_outputs[0]), None, None


def _unpack(flat: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A flat tensor's parts as k and v are shaped."""
    return flat[: k.numel()].view(k.shape), flat[k.numel() :].view(v.shape)


def _add(totals: Sequence[Tensor], more: Sequence[Tensor]) -> None:
    for total, part in zip(totals, more, strict=True):
        total.add_(part)


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor, seq: int) -> None:
    """Merges attention to further keys into `out` and `lse`, in place (arXiv:2205.14135)."""
    merged_lse = lse.logaddexp(more_lse)
    finite = merged_lse.masked_fill(merged_lse == -torch.inf, 0)
    out.mul_(across((lse - finite).exp(), seq)).addcmul_(
        more, across((more_lse - finite).exp(), seq)
    )
    lse.copy_(merged_lse)
