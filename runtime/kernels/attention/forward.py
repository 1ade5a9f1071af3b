"""Attention's forward kernel: FlashAttention-2 (arXiv:2307.08691, algorithm 1)."""
# pyright: basic, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.plain_attention import Setting, sizes
from .. import launching
from .tiles import (
    LOG2E,
    PRECISION,
    Block,
    constants,
    load_ids,
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
    unit,
)


@triton.jit(do_not_specialize=["heads", "queries", "keys", "shift"])
def forward_kernel(
    q, k, v, q_ids, k_ids, out, lse,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    q_ids_batch, q_ids_row, k_ids_batch, k_ids_row, out_batch, out_row, out_head,
    heads, queries, keys, shift, scale,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BACK: tl.constexpr, FORTH: tl.constexpr,
    CAP: tl.constexpr, DOCUMENTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head against all keys it sees; under a causal mask the longest
    begin first.
    """
    tile, batch, head = place(tl.cdiv(queries, ROWS), heads)
    begin = (tl.cdiv(queries, ROWS) - 1 - tile) * ROWS
    k += batch * k_batch + head // GROUP * k_head
    v += batch * v_batch + head // GROUP * v_head
    rows = begin + tl.arange(0, ROWS)
    q_tile = load_tile(
        q + batch * q_batch + head * q_head, begin, q_row, queries, ROWS, D, DP, True
    )
    if DOCUMENTS:
        q_ids, k_ids = q_ids + batch * q_ids_batch, k_ids + batch * k_ids_batch
        tile_ids = load_ids(q_ids, q_ids_row, rows, queries)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
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
            logit = logits(q_tile, tl.trans(k_tile), scale, CAP)
            if PHASE != 1:
                pairs = seen(rows[:, None], columns[None, :], queries, keys, shift, BACK, FORTH)
                if DOCUMENTS:
                    pairs &= tile_ids[:, None] == load_ids(k_ids, k_ids_row, columns, keys)[None, :]
                logit = tl.where(pairs, logit, float("-inf"))
            higher = tl.maximum(peak, tl.max(logit, 1))
            # of rows that have seen nothing yet
            finite = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(logit - finite[:, None])
            less = tl.exp2(peak - finite)
            total = total * less + tl.sum(weights, 1)
            v_tile = load_tile(v, first, v_row, keys, COLUMNS, D, DP, PHASE != 1)
            sums = tl.dot(
                weights.to(v_tile.dtype), v_tile, sums * less[:, None], input_precision=PRECISION
            )
            peak = higher
    store_row(
        lse + (batch * heads + head) * queries,
        (peak + tl.log2(total)) / LOG2E,
        begin,
        queries,
        ROWS,
    )
    result = sums / tl.where(total == 0, 1.0, total)[:, None]
    store_tile(
        out + batch * out_batch + head * out_head, result, begin, out_row, queries, ROWS, D, DP
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ids: Tensor | None,
    k_ids: Tensor | None,
    how: Setting,
    block: Block,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The result in `dtype`, by default q's, as q is shaped, and its log-sum-exp, float32 [b,
    n, s].
    """
    q, k, v = (unit(operand) for operand in (q, k, v))
    batch, queries, heads = sizes(q, how.seq)
    out = q.new_empty(q.shape, dtype=dtype)
    lse = q.new_empty((batch, heads, queries), dtype=torch.float32)
    launching.launch(
        forward_kernel,
        (batch * heads * launching.blocks(queries, block.queries),),
        *(q, k, v, q_ids, k_ids, out, lse),
        *(*operand_strides(q, k, v, q_ids, k_ids, how.seq), *strides(out, how.seq)),
        *(heads, queries, k.shape[how.seq], how.shift, how.scale),
        **constants(how, q, k, q_ids),
        **block.options(),
    )
    return out, lse
