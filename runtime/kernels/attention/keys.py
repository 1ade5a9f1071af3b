"""The kernel for the gradients of keys and values: FlashAttention-2 (arXiv:2307.08691, algorithm 2)."""
# pyright: basic, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from .masks import LOG2E, PRECISION, load_ids, logits, near, seen, span, uncapped
from .tiles import load_row, load_tile, place, store_tile


@triton.jit(do_not_specialize=["heads", "queries", "keys", "shift"])
def keys_kernel(
    q, k, v, q_ids, k_ids, g_out, lse, delta, g_k, g_v,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    q_ids_batch, q_ids_row, k_ids_batch, k_ids_row, g_batch, g_row, g_head, g_k_batch, g_k_row, g_k_head,
    heads, queries, keys, shift, scale,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BACK: tl.constexpr, FORTH: tl.constexpr,
    CAP: tl.constexpr, DOCUMENTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A block of keys and values of one head against the queries, of all heads that use it, that see it."""
    tile, batch, kv_head = place(tl.cdiv(keys, COLUMNS), heads // GROUP)
    begin = tile * COLUMNS
    columns = begin + tl.arange(0, COLUMNS)
    k_tile = load_tile(k + batch * k_batch + kv_head * k_head, begin, k_row, keys, COLUMNS, D, DP, True)
    v_tile = load_tile(v + batch * v_batch + kv_head * v_head, begin, v_row, keys, COLUMNS, D, DP, True)
    if DOCUMENTS:
        q_ids, k_ids = q_ids + batch * q_ids_batch, k_ids + batch * k_ids_batch
        own = load_ids(k_ids, k_ids_row, columns, keys)
    k_sums = tl.zeros([COLUMNS, DP], tl.float32)
    v_sums = tl.zeros([COLUMNS, DP], tl.float32)
    for PHASE in tl.static_range(3 if DOCUMENTS else (0 if FORTH >= 0 else 1), 4 if DOCUMENTS else 3):
        start, stop = span(PHASE, begin - shift, begin + COLUMNS - 1 - shift, queries, ROWS, FORTH, BACK)
        if DOCUMENTS:
            start, stop = near(q_ids, q_ids_row, start, stop, own)
        steps = tl.maximum(tl.cdiv(stop - start, ROWS), 0)
        for step in tl.range(0, GROUP * steps):
            head, first = kv_head * GROUP + step // steps, start + step % steps * ROWS
            rows = first + tl.arange(0, ROWS)
            q_tile = load_tile(q + batch * q_batch + head * q_head, first, q_row, queries, ROWS, D, DP, PHASE != 1)
            g_tile = load_tile(g_out + batch * g_batch + head * g_head, first, g_row, queries, ROWS, D, DP, PHASE != 1)
            of_head = (batch * heads + head) * queries
            row_lse = load_row(lse + of_head, first, queries, ROWS, PHASE != 1)
            row_delta = load_row(delta + of_head, first, queries, ROWS, PHASE != 1)
            logit = logits(k_tile, tl.trans(q_tile), scale, CAP)
            weights = tl.exp2(logit - row_lse[None, :] * LOG2E)
            if PHASE != 1:
                pairs = seen(rows[None, :], columns[:, None], queries, keys, shift, BACK, FORTH)
                if DOCUMENTS:
                    pairs &= load_ids(q_ids, q_ids_row, rows, queries)[None, :] == own[:, None]
                weights = tl.where(pairs, weights, 0.0)
            v_sums = tl.dot(weights.to(g_tile.dtype), g_tile, v_sums, input_precision=PRECISION)
            g_weights = tl.dot(v_tile, tl.trans(g_tile), input_precision=PRECISION)
            g_product = uncapped(weights * (g_weights - row_delta[None, :]), logit, CAP)
            k_sums = tl.dot(g_product.to(q_tile.dtype), q_tile, k_sums, input_precision=PRECISION)
    to = batch * g_k_batch + kv_head * g_k_head
    store_tile(g_k + to, k_sums * scale, begin, g_k_row, keys, COLUMNS, D, DP)
    store_tile(g_v + to, v_sums, begin, g_k_row, keys, COLUMNS, D, DP)
