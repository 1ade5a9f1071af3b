"""The two kernels of all norms, by the formulas in `norms`; what is None (y, bias, mean, gs) is
left out.
"""
# pyright: basic, reportArgumentType=false
# (Triton has no types.)

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def norm_forward(
    x, y, weight, bias, s, a, mean, root, x_stride, y_stride, rows, eps,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows)[:, None] & (column < WIDTH)
    start = row.to(tl.int64)[:, None]
    u = tl.load(x + start * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if y is not None:
        u += tl.load(y + start * y_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = u.to(s.dtype.element_ty)
        tl.store(s + start * WIDTH + column, rounded, mask=inside)
        u = rounded.to(tl.float32)  # what backward will see
    if mean is not None:
        center = tl.sum(u, 1) / WIDTH
        tl.store(mean + row, center, mask=row < rows)
        u = tl.where(inside, u - center[:, None], 0.0)
    r = tl.rsqrt(tl.sum(u * u, 1) / WIDTH + eps)
    tl.store(root + row, r, mask=row < rows)
    out = (
        u
        * r[:, None]
        * tl.load(tl.broadcast_to(weight + column, [ROWS, COLUMNS]), mask=inside, other=0.0).to(
            tl.float32
        )
    )
    if bias is not None:
        out += tl.load(tl.broadcast_to(bias + column, [ROWS, COLUMNS]), mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(a + start * WIDTH + column, out.to(a.dtype.element_ty), mask=inside)


@triton.jit
def _normal(s, da, mean, r, inside, POLICY: tl.constexpr):
    """n and da of some rows, from pointers to s and da, the rows' mean or None, and 1 / root."""
    n = tl.load(s, mask=inside, other=0.0, eviction_policy=POLICY).to(tl.float32)
    if mean is not None:
        n -= mean
    return n * r, tl.load(da, mask=inside, other=0.0, eviction_policy=POLICY).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def norm_backward(
    da, gs, s, weight, mean, root, ds, dweight, dbias, da_stride, gs_stride, s_stride, rows,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """AGAIN: rows are not kept in registers, but read twice: for their sums, and once more, from
    the L1 cache, for their gradients.
    """
    column = tl.arange(0, COLUMNS)[None, :]
    to_weight = tl.zeros([ROWS, COLUMNS], tl.float32)
    to_bias = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < WIDTH)
        start = row.to(tl.int64)[:, None]
        of_s, of_da = s + start * s_stride + column, da + start * da_stride + column
        of_weight = tl.broadcast_to(weight + column, [ROWS, COLUMNS])
        r = tl.load(root + row, mask=row < rows, other=0.0)[:, None]
        center = None if mean is None else tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
        n, d = _normal(of_s, of_da, center, r, inside, "evict_last" if AGAIN else "")
        if AGAIN:
            d *= tl.load(of_weight, mask=inside, other=0.0).to(tl.float32)
            along, ahead = tl.sum(d * n, 1) / WIDTH, tl.sum(d, 1) / WIDTH
            n, d = _normal(of_s, of_da, center, r, inside, "evict_first")
        to_weight += d * n
        if dbias is not None:
            to_bias += d
        d *= tl.load(of_weight, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if not AGAIN:
            along, ahead = tl.sum(d * n, 1) / WIDTH, tl.sum(d, 1) / WIDTH
        back = d - n * along[:, None]
        if mean is not None:
            back -= ahead[:, None]
        back *= r
        if gs is not None:
            back += tl.load(gs + start * gs_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(ds + start * WIDTH + column, back.to(ds.dtype.element_ty), mask=inside)
    place = tl.program_id(0) * WIDTH + tl.arange(0, COLUMNS)
    real = tl.arange(0, COLUMNS) < WIDTH
    tl.store(dweight + place, tl.sum(to_weight, 0), mask=real)
    if dbias is not None:
        tl.store(dbias + place, tl.sum(to_bias, 0), mask=real)
