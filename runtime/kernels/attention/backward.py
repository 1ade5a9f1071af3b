"""Backward of attention: the kernels of delta, of keys and values, and of queries
(arXiv:2307.08691, algorithm 2).

Both of the latter recompute the weights from q, k and the log-sum-exp, without atomics.  The
gradient of a softmax subtracts δ = Σ out · dout of each row.
"""
# pyright: basic, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.plain_attention import Saved, Setting, sizes
from .. import launching
from .tiles import (
    LOG2E,
    PRECISION,
    Blocks,
    constants,
    gradient_before_cap,
    load_ids,
    load_row,
    load_tile,
    logits,
    near,
    operand_strides,
    place,
    seen,
    span,
    store_row,
    store_tile,
    strides,
    tile_width,
    unit,
)

_ELEMENTS = 4096
"""Elements of each tensor in one program."""


@triton.jit(do_not_specialize=["heads", "queries"])
def delta_kernel(
    out, g_out, delta,
    out_batch, out_row, out_head, g_batch, g_row, g_head, heads, queries,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile, batch, head = place(tl.cdiv(queries, ROWS), heads)
    begin = tile * ROWS
    out_tile = load_tile(
        out + batch * out_batch + head * out_head, begin, out_row, queries, ROWS, D, DP, True
    )
    g_tile = load_tile(
        g_out + batch * g_batch + head * g_head, begin, g_row, queries, ROWS, D, DP, True
    )
    result = tl.sum(out_tile.to(tl.float32) * g_tile.to(tl.float32), 1)
    store_row(delta + (batch * heads + head) * queries, result, begin, queries, ROWS)


def delta(out: Tensor, g_out: Tensor, seq: int) -> Tensor:
    """δ, float32 [b, n, s]."""
    batch, queries, heads = sizes(out, seq)
    result = out.new_empty((batch, heads, queries), dtype=torch.float32)
    dim = out.shape[-1]
    rows = _ELEMENTS // tile_width(dim)
    launching.launch(
        delta_kernel,
        (batch * heads * launching.blocks(queries, rows),),
        *(out, g_out, result),
        *(*strides(out, seq), *strides(g_out, seq), heads, queries),
        D=dim,
        DP=tile_width(dim),
        ROWS=rows,
        warps=4,
    )
    return result


@triton.jit(do_not_specialize=["heads", "queries", "keys", "shift"])
def keys_kernel(
    q, k, v, q_ids, k_ids, g_out, lse, delta, g_k, g_v,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    q_ids_batch, q_ids_row, k_ids_batch, k_ids_row, g_batch, g_row, g_head, g_k_batch, g_k_row,
    g_k_head,
    heads, queries, keys, shift, scale,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BACK: tl.constexpr, FORTH: tl.constexpr,
    CAP: tl.constexpr, DOCUMENTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A block of keys and values of one head against the queries, of all heads that use it,
    that see it.
    """
    tile, batch, kv_head = place(tl.cdiv(keys, COLUMNS), heads // GROUP)
    begin = tile * COLUMNS
    columns = begin + tl.arange(0, COLUMNS)
    k_tile = load_tile(
        k + batch * k_batch + kv_head * k_head, begin, k_row, keys, COLUMNS, D, DP, True
    )
    v_tile = load_tile(
        v + batch * v_batch + kv_head * v_head, begin, v_row, keys, COLUMNS, D, DP, True
    )
    if DOCUMENTS:
        q_ids, k_ids = q_ids + batch * q_ids_batch, k_ids + batch * k_ids_batch
        tile_ids = load_ids(k_ids, k_ids_row, columns, keys)
    k_sums = tl.zeros([COLUMNS, DP], tl.float32)
    v_sums = tl.zeros([COLUMNS, DP], tl.float32)
    for PHASE in tl.static_range(
        3 if DOCUMENTS else (0 if FORTH >= 0 else 1), 4 if DOCUMENTS else 3
    ):
        start, stop = span(
            PHASE, begin - shift, begin + COLUMNS - 1 - shift, queries, ROWS, FORTH, BACK
        )
        if DOCUMENTS:
            start, stop = near(q_ids, q_ids_row, start, stop, tile_ids)
        steps = tl.maximum(tl.cdiv(stop - start, ROWS), 0)
        for step in tl.range(0, GROUP * steps):
            head, first = kv_head * GROUP + step // steps, start + step % steps * ROWS
            rows = first + tl.arange(0, ROWS)
            q_tile = load_tile(
                q + batch * q_batch + head * q_head, first, q_row, queries, ROWS, D, DP, PHASE != 1
            )
            g_tile = load_tile(
                g_out + batch * g_batch + head * g_head,
                first,
                g_row,
                queries,
                ROWS,
                D,
                DP,
                PHASE != 1,
            )
            of_head = (batch * heads + head) * queries
            row_lse = load_row(lse + of_head, first, queries, ROWS, PHASE != 1)
            row_delta = load_row(delta + of_head, first, queries, ROWS, PHASE != 1)
            logit = logits(k_tile, tl.trans(q_tile), scale, CAP)
            weights = tl.exp2(logit - row_lse[None, :] * LOG2E)
            if PHASE != 1:
                pairs = seen(rows[None, :], columns[:, None], queries, keys, shift, BACK, FORTH)
                if DOCUMENTS:
                    pairs &= load_ids(q_ids, q_ids_row, rows, queries)[None, :] == tile_ids[:, None]
                weights = tl.where(pairs, weights, 0.0)
            v_sums = tl.dot(weights.to(g_tile.dtype), g_tile, v_sums, input_precision=PRECISION)
            g_weights = tl.dot(v_tile, tl.trans(g_tile), input_precision=PRECISION)
            g_product = gradient_before_cap(weights * (g_weights - row_delta[None, :]), logit, CAP)
            k_sums = tl.dot(g_product.to(q_tile.dtype), q_tile, k_sums, input_precision=PRECISION)
    to = batch * g_k_batch + kv_head * g_k_head
    store_tile(g_k + to, k_sums * scale, begin, g_k_row, keys, COLUMNS, D, DP)
    store_tile(g_v + to, v_sums, begin, g_k_row, keys, COLUMNS, D, DP)


@triton.jit(do_not_specialize=["heads", "queries", "keys", "shift"])
def queries_kernel(
    q, k, v, q_ids, k_ids, g_out, lse, delta, g_q,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    q_ids_batch, q_ids_row, k_ids_batch, k_ids_row, g_batch, g_row, g_head, g_q_batch, g_q_row,
    g_q_head,
    heads, queries, keys, shift, scale,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BACK: tl.constexpr, FORTH: tl.constexpr,
    CAP: tl.constexpr, DOCUMENTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head against all keys it sees, as in `forward_kernel`."""
    tile, batch, head = place(tl.cdiv(queries, ROWS), heads)
    begin = (tl.cdiv(queries, ROWS) - 1 - tile) * ROWS
    k += batch * k_batch + head // GROUP * k_head
    v += batch * v_batch + head // GROUP * v_head
    rows = begin + tl.arange(0, ROWS)
    q_tile = load_tile(
        q + batch * q_batch + head * q_head, begin, q_row, queries, ROWS, D, DP, True
    )
    g_tile = load_tile(
        g_out + batch * g_batch + head * g_head, begin, g_row, queries, ROWS, D, DP, True
    )
    of_head = (batch * heads + head) * queries
    row_lse = load_row(lse + of_head, begin, queries, ROWS, True)[:, None] * LOG2E
    row_delta = load_row(delta + of_head, begin, queries, ROWS, True)[:, None]
    if DOCUMENTS:
        q_ids, k_ids = q_ids + batch * q_ids_batch, k_ids + batch * k_ids_batch
        tile_ids = load_ids(q_ids, q_ids_row, rows, queries)
    sums = tl.zeros([ROWS, DP], tl.float32)
    for PHASE in tl.static_range(
        3 if DOCUMENTS else (0 if BACK >= 0 else 1), 4 if DOCUMENTS else 3
    ):
        start, stop = span(
            PHASE, begin + shift, begin + ROWS - 1 + shift, keys, COLUMNS, BACK, FORTH
        )
        if DOCUMENTS:
            start, stop = near(k_ids, k_ids_row, start, stop, tile_ids)
        for first in tl.range(start, stop, COLUMNS):
            columns = first + tl.arange(0, COLUMNS)
            k_tile = load_tile(k, first, k_row, keys, COLUMNS, D, DP, PHASE != 1)
            v_tile = load_tile(v, first, v_row, keys, COLUMNS, D, DP, PHASE != 1)
            logit = logits(q_tile, tl.trans(k_tile), scale, CAP)
            weights = tl.exp2(logit - row_lse)
            if PHASE != 1:
                pairs = seen(rows[:, None], columns[None, :], queries, keys, shift, BACK, FORTH)
                if DOCUMENTS:
                    pairs &= tile_ids[:, None] == load_ids(k_ids, k_ids_row, columns, keys)[None, :]
                weights = tl.where(pairs, weights, 0.0)
            g_weights = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
            g_product = gradient_before_cap(weights * (g_weights - row_delta), logit, CAP)
            sums = tl.dot(g_product.to(k_tile.dtype), k_tile, sums, input_precision=PRECISION)
    store_tile(
        g_q + batch * g_q_batch + head * g_q_head,
        sums * scale,
        begin,
        g_q_row,
        queries,
        ROWS,
        D,
        DP,
    )


def backward(
    saved: Saved,
    g_out: Tensor,
    how: Setting,
    blocks: Blocks,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their shapes and in `dtype`, by default their own dtypes."""
    q, k, v, q_ids, k_ids, out, lse = saved
    q, k, v, g_out = (unit(operand) for operand in (q, k, v, g_out))
    batch, queries, heads = sizes(q, how.seq)
    _, keys, kv_heads = sizes(k, how.seq)
    g_q, g_k, g_v = (operand.new_empty(operand.shape, dtype=dtype) for operand in (q, k, v))
    operands = (q, k, v, q_ids, k_ids, g_out, lse, delta(out, g_out, how.seq))
    all_strides = (*operand_strides(q, k, v, q_ids, k_ids, how.seq), *strides(g_out, how.seq))
    sizes_and_scale = (heads, queries, keys, how.shift, how.scale)
    compiled_for = constants(how, q, k, q_ids)
    grid = (batch * kv_heads * launching.blocks(keys, blocks.keys.keys),)
    args = (*operands, g_k, g_v, *all_strides, *strides(g_k, how.seq), *sizes_and_scale)
    launching.launch(keys_kernel, grid, *args, **compiled_for, **blocks.keys.options())
    grid = (batch * heads * launching.blocks(queries, blocks.queries.queries),)
    args = (*operands, g_q, *all_strides, *strides(g_q, how.seq), *sizes_and_scale)
    launching.launch(queries_kernel, grid, *args, **compiled_for, **blocks.queries.options())
    return g_q, g_k, g_v
