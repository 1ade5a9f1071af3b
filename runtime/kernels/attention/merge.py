"""Joins attention to some keys with attention to others, as flash attention does block by block (arXiv:2205.14135).

lse = log(exp(lse₁) + exp(lse₂))    wᵢ = exp(lseᵢ − lse)
out = w₁ · out₁ + w₂ · out₂

doutᵢ = wᵢ · dout
dlse₁ = w₁ · (dlse + w₂ · t)    dlse₂ = w₂ · (dlse − w₁ · t)    t = Σ dout · (out₁ − out₂)
"""
# pyright: basic, reportGeneralTypeIssues=false

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from ...comm.functional_collectives import distinct
from ...ops.plain_attention import across, sizes
from .. import launching
from ..launching import Tile
from .layouts import padded, strides, unit
from .tiles import load_row, load_tile, place, store_row, store_tile

_Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


@triton.jit
def _shares(lse1, lse2):
    """w₁, w₂ and lse; 0, 0 and −∞ where both are −∞."""
    peak = tl.maximum(lse1, lse2)
    finite = tl.where(peak == float("-inf"), 0.0, peak)
    share1, share2 = tl.exp(lse1 - finite), tl.exp(lse2 - finite)
    total = share1 + share2
    some = tl.where(total == 0, 1.0, total)
    return share1 / some, share2 / some, finite + tl.log(total)


@triton.jit(do_not_specialize=["heads", "queries"])
def merge_forward(
    out1, lse1, out2, lse2, out, lse,
    batch1, row1, head1, batch2, row2, head2, out_batch, out_row, out_head, heads, queries,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile, batch, head = place(tl.cdiv(queries, ROWS), heads)
    begin, of_head = tile * ROWS, (batch * heads + head) * queries
    share1, share2, both = _shares(
        load_row(lse1 + of_head, begin, queries, ROWS, True), load_row(lse2 + of_head, begin, queries, ROWS, True)
    )
    tile1 = load_tile(out1 + batch * batch1 + head * head1, begin, row1, queries, ROWS, D, DP, True).to(tl.float32)
    tile2 = load_tile(out2 + batch * batch2 + head * head2, begin, row2, queries, ROWS, D, DP, True).to(tl.float32)
    joined = tile1 * share1[:, None] + tile2 * share2[:, None]
    store_tile(out + batch * out_batch + head * out_head, joined, begin, out_row, queries, ROWS, D, DP)
    store_row(lse + of_head, both, begin, queries, ROWS)


@triton.jit(do_not_specialize=["heads", "queries"])
def merge_backward(
    out1, lse1, out2, lse2, g_out, g_lse, g_out1, g_lse1, g_out2, g_lse2,
    batch1, row1, head1, batch2, row2, head2, g_batch, g_row, g_head, to_batch, to_row, to_head, heads, queries,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile, batch, head = place(tl.cdiv(queries, ROWS), heads)
    begin, of_head = tile * ROWS, (batch * heads + head) * queries
    share1, share2, _ = _shares(
        load_row(lse1 + of_head, begin, queries, ROWS, True), load_row(lse2 + of_head, begin, queries, ROWS, True)
    )
    tile1 = load_tile(out1 + batch * batch1 + head * head1, begin, row1, queries, ROWS, D, DP, True).to(tl.float32)
    tile2 = load_tile(out2 + batch * batch2 + head * head2, begin, row2, queries, ROWS, D, DP, True).to(tl.float32)
    g_tile = load_tile(g_out + batch * g_batch + head * g_head, begin, g_row, queries, ROWS, D, DP, True).to(tl.float32)
    apart = tl.sum(g_tile * (tile1 - tile2), 1)
    g_both = load_row(g_lse + of_head, begin, queries, ROWS, True) if g_lse is not None else 0.0
    to = batch * to_batch + head * to_head
    store_tile(g_out1 + to, g_tile * share1[:, None], begin, to_row, queries, ROWS, D, DP)
    store_tile(g_out2 + to, g_tile * share2[:, None], begin, to_row, queries, ROWS, D, DP)
    store_row(g_lse1 + of_head, share1 * (g_both + share2 * apart), begin, queries, ROWS)
    store_row(g_lse2 + of_head, share2 * (g_both - share1 * apart), begin, queries, ROWS)


@dataclass(frozen=True)
class Merge:
    """Attention to all of some keys, from that to each of two parts of them, which have no key in common.

    tiles: by head_dim, the rows that one program joins.  Saves its operands.
    """

    tiles: Mapping[int, Tile]

    def __call__(self, out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor, seq: int) -> tuple[Tensor, Tensor]:
        """The result, [s, b, n, d] with seq 0 or [b, s, n, d] with 1, and its log-sum-exp [b, n, s], natural.

        lse1 and lse2 are float32, or float64 with float64; −∞ where a query sees none of the keys.
        """
        tile = launching.tile_for(self, self.tiles, out1.shape[-1], out1, out2, lse1, lse2)
        return cast(Any, _Merge).apply(out1, lse1, out2, lse2, seq, tile)


class _Merge(Function):
    """By kernels or by torch, with the same tensors saved."""

    @staticmethod
    def forward(
        ctx: Any, out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor, seq: int, tile: Tile | None
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(out1, lse1, out2, lse2)
        ctx.seq, ctx.tile = seq, tile
        ctx.set_materialize_grads(False)
        return _plain(out1, lse1, out2, lse2, seq) if tile is None else _forward(out1, lse1, out2, lse2, seq, tile)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = cast(_Gradients, ctx.saved_tensors)
        g_out, g_lse = grad_outputs
        g_out = torch.zeros_like(saved[0]) if g_out is None else g_out
        if ctx.tile is None:
            return *_plain_backward(saved, g_out, g_lse, ctx.seq), None, None
        return *_backward(saved, g_out, g_lse, ctx.seq, ctx.tile), None, None


def _forward(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor, seq: int, tile: Tile) -> tuple[Tensor, Tensor]:
    out1, out2 = unit(out1), unit(out2)
    out, lse = out1.new_empty(out1.shape), lse1.new_empty(lse1.shape)
    given = (out1, lse1.contiguous(), out2, lse2.contiguous(), out, lse)
    _launch(merge_forward, given, (*strides(out1, seq), *strides(out2, seq), *strides(out, seq)), out, seq, tile)
    return out, lse


def _backward(saved: _Gradients, g_out: Tensor, g_lse: Tensor | None, seq: int, tile: Tile) -> _Gradients:
    out1, lse1, out2, lse2 = saved
    out1, out2, g_out = unit(out1), unit(out2), unit(g_out)
    g_out1, g_out2 = out1.new_empty(out1.shape), out2.new_empty(out2.shape)
    g_lse1, g_lse2 = lse1.new_empty(lse1.shape), lse2.new_empty(lse2.shape)
    given = (out1, lse1.contiguous(), out2, lse2.contiguous(), g_out, None if g_lse is None else g_lse.contiguous())
    apart = (*strides(out1, seq), *strides(out2, seq), *strides(g_out, seq), *strides(g_out1, seq))
    _launch(merge_backward, (*given, g_out1, g_lse1, g_out2, g_lse2), apart, out1, seq, tile)
    return g_out1, g_lse1, g_out2, g_lse2


def _launch(
    kernel: Any, given: tuple[Tensor | None, ...], apart: tuple[int, ...], x: Tensor, seq: int, tile: Tile
) -> None:
    batch, queries, heads = sizes(x, seq)
    dim = x.shape[-1]
    grid = (batch * heads * launching.blocks(queries, tile.rows),)
    constants = {"D": dim, "DP": padded(dim), "ROWS": tile.rows}
    launching.launch(kernel, grid, *given, *apart, heads, queries, **constants, warps=tile.warps)


def _plain(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor, seq: int) -> tuple[Tensor, Tensor]:
    share1, share2, lse = _plain_shares(lse1, lse2)
    out = (across(share1, seq) * out1 + across(share2, seq) * out2).to(out1.dtype)
    return distinct(out), lse


def _plain_backward(saved: _Gradients, g_out: Tensor, g_lse: Tensor | None, seq: int) -> _Gradients:
    out1, lse1, out2, lse2 = saved
    share1, share2, _ = _plain_shares(lse1, lse2)
    apart = (g_out * (out1.to(lse1.dtype) - out2)).sum(-1).movedim(seq, -1)
    g_both = 0.0 if g_lse is None else g_lse
    return (
        (g_out * across(share1, seq)).to(out1.dtype),
        share1 * (g_both + share2 * apart),
        (g_out * across(share2, seq)).to(out2.dtype),
        share2 * (g_both - share1 * apart),
    )


def _plain_shares(lse1: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    lse = lse1.logaddexp(lse2)
    finite = lse.masked_fill(lse == -torch.inf, 0)
    return (lse1 - finite).exp(), (lse2 - finite).exp(), lse
