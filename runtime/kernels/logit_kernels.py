"""The kernels of `logits`: softmax statistics of rows, and the logits' gradient.

They compute in float32.  `stride` is the stride of the rows of logits.  `size` of the `width`
columns are classes, and `first` is the first class.  smoothing, class_share and CAP are smoothing,
each and cap of `Classes`.
"""
# pyright: basic

import torch
import triton
import triton.language as tl

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""Below every logit, and finite: lanes and ranks without classes have it as their maximum, and no
NaN comes from them.
"""


@triton.jit
def _soft_cap(x, CAP: tl.constexpr):
    if CAP != 0:
        x = CAP * (2 * tl.sigmoid(2 / CAP * x) - 1)
    return x


@triton.jit
def _merge_max_and_sum(m, z, x):
    """m and z of each lane, joined with its row of x: one exponential for each element, and one for
    the lane.
    """
    peak = tl.maximum(m, tl.max(x, axis=1))
    return peak, z * tl.exp(m - peak) + tl.sum(tl.exp(x - peak[:, None]), axis=1)


@triton.jit
def logit_softmax_stats(
    logits, labels, m_parts, z_parts, t_parts, stride, first, size, width, smoothing, class_share,
    CAP: tl.constexpr, SMOOTHED: tl.constexpr, BEGINS: tl.constexpr, LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """One row for each program.

    Each of its lanes has m and z of its own until the end, and takes WIDTH neighbouring columns,
    one load of 16 bytes, at a time: in the loop no thread waits for another.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    here = (label >= first) & (label < first + size)
    of_label = _soft_cap(
        tl.load(logits + (label - first), mask=here, other=0.0).to(tl.float32), CAP
    )
    columns = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    m, z = tl.full([LANES], LOWEST, tl.float32), tl.zeros([LANES], tl.float32)
    total = tl.zeros([LANES], tl.float32)
    whole = size // (LANES * WIDTH) * (LANES * WIDTH)
    for start in range(0, whole, LANES * WIDTH):
        x = _soft_cap(tl.load(logits + start + columns).to(tl.float32), CAP)
        m, z = _merge_max_and_sum(m, z, x)
        if SMOOTHED:
            total += tl.sum(x, axis=1)
    if whole < size:
        # padding too: of a width that 16 divides, no load of 16 bytes is cut
        there = whole + columns < width
        x = _soft_cap(tl.load(logits + whole + columns, mask=there, other=0.0).to(tl.float32), CAP)
        real = whole + columns < size
        m, z = _merge_max_and_sum(m, z, tl.where(real, x, float("-inf")))
        if SMOOTHED:
            total += tl.sum(tl.where(real, x, 0.0), axis=1)

    t = (1 - smoothing) * tl.where(here, of_label, 0.0)
    if SMOOTHED:
        t += class_share * tl.sum(total, axis=0)
    peak = tl.max(m, axis=0)
    if not BEGINS:
        before = tl.load(m_parts + row)
        peak = tl.maximum(peak, before)
        t += tl.load(t_parts + row)
    z_all = tl.sum(z * tl.exp(m - peak), axis=0)
    if not BEGINS:
        z_all += tl.load(z_parts + row) * tl.exp(before - peak)
    tl.store(m_parts + row, peak)
    tl.store(z_parts + row, z_all)
    tl.store(t_parts + row, t)


@triton.jit
def logit_gradient(
    logits, out, labels, m, g_z, g_t, stride, first, size, width, smoothing, class_share,
    CAP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One block of a row for each program; `out` is as wide, and may be the logits themselves."""
    blocks = tl.cdiv(width, COLUMNS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    there = columns < width
    x = _soft_cap(
        tl.load(logits + row * stride + columns, mask=there, other=0.0).to(tl.float32), CAP
    )
    d_t, label = tl.load(g_t + row), tl.load(labels + row)
    gradient = tl.load(g_z + row) * tl.exp(x - tl.load(m + row)) + d_t * class_share
    gradient += tl.where(columns == label - first, d_t * (1 - smoothing), 0.0)
    if CAP != 0:
        gradient *= 1 - x / CAP * (x / CAP)
    gradient = tl.where(columns < size, gradient, 0.0)
    tl.store(out + row * width + columns, gradient.to(out.dtype.element_ty), mask=there)
