"""What the gradient of a softmax subtracts: δ = Σ out · dout − dlse of each row (arXiv:2307.08691, algorithm 2)."""
# pyright: basic, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import launching
from .layouts import padded, sizes, strides
from .tiles import load_row, load_tile, place, store_row

_ELEMENTS = 4096
"""Of each tensor, in one program."""


@triton.jit(do_not_specialize=["heads", "queries"])
def delta_kernel(
    out, g_out, g_lse, delta,
    out_batch, out_row, out_head, g_batch, g_row, g_head, heads, queries,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile, batch, head = place(tl.cdiv(queries, ROWS), heads)
    begin = tile * ROWS
    out_tile = load_tile(out + batch * out_batch + head * out_head, begin, out_row, queries, ROWS, D, DP, True)
    g_tile = load_tile(g_out + batch * g_batch + head * g_head, begin, g_row, queries, ROWS, D, DP, True)
    result = tl.sum(out_tile.to(tl.float32) * g_tile.to(tl.float32), 1)
    of_head = (batch * heads + head) * queries
    if g_lse is not None:
        result -= load_row(g_lse + of_head, begin, queries, ROWS, True)
    store_row(delta + of_head, result, begin, queries, ROWS)


def delta(out: Tensor, g_out: Tensor, g_lse: Tensor | None, seq: int) -> Tensor:
    """Float32 [b, n, s]; without a gradient of the log-sum-exp that is 0."""
    batch, queries, heads = sizes(out, seq)
    result = out.new_empty((batch, heads, queries), dtype=torch.float32)
    dim = out.shape[-1]
    rows = _ELEMENTS // padded(dim)
    launching.launch(
        delta_kernel,
        (batch * heads * launching.blocks(queries, rows),),
        *(out, g_out, g_lse if g_lse is None else g_lse.contiguous(), result),
        *(*strides(out, seq), *strides(g_out, seq), heads, queries),
        D=dim,
        DP=padded(dim),
        ROWS=rows,
        warps=4,
    )
    return result
