"""The kernel for the gradient of queries: recomputes the weights, without atomics (arXiv:2307.08691)."""
# pyright: basic, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from .masks import LOG2E, PRECISION, load_ids, logits, near, seen, span, uncapped
from .tiles import load_row, load_tile, place, store_tile


@triton.jit(do_not_specialize=["heads", "queries", "keys", "shift"])
def queries_kernel(
    q, k, v, q_ids, k_ids, g_out, lse, delta, g_q,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    q_ids_batch, q_ids_row, k_ids_batch, k_ids_row, g_batch, g_row, g_head, g_q_batch, g_q_row, g_q_head,
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
    q_tile = load_tile(q + batch * q_batch + head * q_head, begin, q_row, queries, ROWS, D, DP, True)
    g_tile = load_tile(g_out + batch * g_batch + head * g_head, begin, g_row, queries, ROWS, D, DP, True)
    of_head = (batch * heads + head) * queries
    row_lse = load_row(lse + of_head, begin, queries, ROWS, True)[:, None] * LOG2E
    row_delta = load_row(delta + of_head, begin, queries, ROWS, True)[:, None]
    if DOCUMENTS:
        q_ids, k_ids = q_ids + batch * q_ids_batch, k_ids + batch * k_ids_batch
        own = load_ids(q_ids, q_ids_row, rows, queries)
    sums = tl.zeros([ROWS, DP], tl.float32)
    for PHASE in tl.static_range(3 if DOCUMENTS else (0 if BACK >= 0 else 1), 4 if DOCUMENTS else 3):
        start, stop = span(PHASE, begin + shift, begin + ROWS - 1 + shift, keys, COLUMNS, BACK, FORTH)
        if DOCUMENTS:
            start, stop = near(k_ids, k_ids_row, start, stop, own)
        for first in tl.range(start, stop, COLUMNS):
            columns = first + tl.arange(0, COLUMNS)
            k_tile = load_tile(k, first, k_row, keys, COLUMNS, D, DP, PHASE != 1)
            v_tile = load_tile(v, first, v_row, keys, COLUMNS, D, DP, PHASE != 1)
            logit = logits(q_tile, tl.trans(k_tile), scale, CAP)
            weights = tl.exp2(logit - row_lse)
            if PHASE != 1:
                pairs = seen(rows[:, None], columns[None, :], queries, keys, shift, BACK, FORTH)
                if DOCUMENTS:
                    pairs &= own[:, None] == load_ids(k_ids, k_ids_row, columns, keys)[None, :]
                weights = tl.where(pairs, weights, 0.0)
            g_weights = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
            g_product = uncapped(weights * (g_weights - row_delta), logit, CAP)
            sums = tl.dot(g_product.to(k_tile.dtype), k_tile, sums, input_precision=PRECISION)
    store_tile(g_q + batch * g_q_batch + head * g_q_head, sums * scale, begin, g_q_row, queries, ROWS, D, DP)
