"""Rows of experts: copies of tokens, and sums of rows by token, each row read and written once.

    dispatch    row = x                              dx = Σ drow, over a token's choices in their
                order
    combine     out = Σ gate · row                   drow = gate · dout    dgate = Σ dout · row,
                over the width

A program has some tokens with all their choices, so that nothing is added by two of them.
"""
# pyright: basic, reportGeneralTypeIssues=false

from functools import partial
from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...comm.experts import Order
from ...ops import routed_rows
from ...ops.routed_rows import PLAIN, Backend
from .. import launching
from ..launching import Tile, Tiled, blocks, matrix, next_power_of_two


@triton.jit(do_not_specialize=["tokens"])
def dispatch_kernel(
    x, places, rows, x_stride, tokens,
    K: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (token < tokens)[:, None] & (column < WIDTH)
    tile = tl.load(x + token[:, None] * x_stride + column, mask=inside, other=0.0)
    for choice in tl.static_range(K):
        row = tl.load(places + token * K + choice, mask=token < tokens, other=-1)[:, None]
        tl.store(rows + row * WIDTH + column, tile, mask=inside & (row >= 0))


@triton.jit(do_not_specialize=["tokens"])
def combine_kernel(
    rows, gates, places, out, rows_stride, tokens,
    K: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (token < tokens)[:, None] & (column < WIDTH)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for choice in tl.static_range(K):
        row = tl.load(places + token * K + choice, mask=token < tokens, other=-1)[:, None]
        tile = tl.load(rows + row * rows_stride + column, mask=inside & (row >= 0), other=0.0).to(
            tl.float32
        )
        if gates is not None:
            tile *= tl.load(gates + token * K + choice, mask=token < tokens, other=0.0).to(
                tl.float32
            )[:, None]
        total += tile
    tl.store(out + token[:, None] * WIDTH + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def spread_kernel(
    gradient, rows, gates, places, of_rows, of_gates, gradient_stride, rows_stride,
    K: tl.constexpr, KP: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One token."""
    token = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, KP)
    row = tl.load(places + token * K + choice, mask=choice < K, other=-1)[:, None]
    gate = tl.load(gates + token * K + choice, mask=choice < K, other=0.0).to(tl.float32)
    dots = tl.zeros([KP, COLUMNS], tl.float32)
    for first in tl.static_range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        inside = (column < WIDTH) & (row >= 0)
        tile = tl.load(
            gradient + token * gradient_stride + column, mask=column < WIDTH, other=0.0
        ).to(tl.float32)
        dots += (
            tl.load(rows + row * rows_stride + column, mask=inside, other=0.0).to(tl.float32) * tile
        )
        tl.store(
            of_rows + row * WIDTH + column,
            (tile * gate[:, None]).to(of_rows.dtype.element_ty),
            mask=inside,
        )
    tl.store(
        of_gates + token * K + choice,
        tl.sum(dots, 1).to(of_gates.dtype.element_ty),
        mask=choice < K,
    )


class Dispatch(Tiled[Tile]):
    """`scalec.runtime.dispatch`; tiles by the width of rows.  Saves indices alone."""

    def __call__(self, x: Tensor, order: Order) -> Tensor:
        """[tokens…, h] → [rows, h]."""
        return routed_rows.dispatch(x, order, _backend(self.tile_for(x.shape[-1], x)))


class Combine(Tiled[Tile]):
    """`scalec.runtime.combine`; tiles by the width of rows.  Saves rows and gates."""

    def __call__(self, rows: Tensor, gates: Tensor, order: Order) -> Tensor:
        """[rows, h], [tokens…, k] → [tokens…, h]."""
        tile = self.tile_for(rows.shape[-1], rows, gates)
        return routed_rows.combine(rows, gates, order, _backend(tile))


def _backend(tile: Tile | None) -> Backend:
    if tile is None:
        return PLAIN
    return Backend(
        partial(_dispatch_rows, tile=tile),
        partial(_combine_rows, tile=tile),
        partial(_spread, tile=tile),
    )


def _dispatch_rows(x: Tensor, order: Order, tile: Tile) -> Tensor:
    width = x.shape[-1]
    x, rows = matrix(x, width), _for_rows(x, order)
    _by_tokens(dispatch_kernel, order, width, tile, x, order.rows, rows, x.stride(0))
    return rows


def _for_rows(like: Tensor, order: Order) -> Tensor:
    """Memory for rows as wide as the rows of `like`, zero where they are padded."""
    shape = prod(order.shape), like.shape[-1]
    if order.padded:
        return like.new_zeros(shape)
    return like.new_empty(shape)


def _combine_rows(rows: Tensor, gates: Tensor | None, order: Order, tile: Tile) -> Tensor:
    width = rows.shape[-1]
    rows, out = matrix(rows, width), rows.new_empty((len(order.rows), width))
    if gates is not None:
        gates = gates.contiguous()
    _by_tokens(combine_kernel, order, width, tile, rows, gates, order.rows, out, rows.stride(0))
    return out


def _by_tokens(kernel: Any, order: Order, width: int, tile: Tile, *args: Any) -> None:
    tokens, k = order.rows.shape
    columns = tile.across(width)
    grid = blocks(tokens, tile.rows), blocks(width, columns)
    launching.launch(kernel, grid, *args, tokens, K=k, **tile.options(width, columns))


def _spread(
    gradient: Tensor, rows: Tensor, gates: Tensor, order: Order, tile: Tile
) -> tuple[Tensor, Tensor]:
    (tokens, k), width = order.rows.shape, rows.shape[-1]
    gradient, rows = matrix(gradient, width), matrix(rows, width)
    of_rows, of_gates = (
        _for_rows(rows, order),
        torch.empty_like(gates, memory_format=torch.contiguous_format),
    )
    launching.launch(
        spread_kernel,
        (tokens,),
        *(
            gradient,
            rows,
            gates.contiguous(),
            order.rows,
            of_rows,
            of_gates,
            gradient.stride(0),
            rows.stride(0),
        ),
        warps=tile.warps,
        K=k,
        KP=next_power_of_two(k),
        WIDTH=width,
        COLUMNS=min(
            tile.across(width), next_power_of_two(width), max(16, 4096 // next_power_of_two(k))
        ),
    )
    return of_rows, of_gates
