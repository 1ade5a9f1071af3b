"""Attention masks, for whole blocks and for single pairs; soft-capped scores.

The query of row r stands at r + shift among the keys, and sees from BACK behind that to FORTH ahead of it; a negative
BACK or FORTH is no limit.
"""
# pyright: basic

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
PRECISION = tl.constexpr("tf32x3")
"""Of products in float32, by tensor cores: of the upper 11 bits of both factors, and of each with the other's rest."""

_CHUNK = tl.constexpr(1024)


@triton.jit
def span(PHASE: tl.constexpr, first, last, size, STEP: tl.constexpr, BACK: tl.constexpr, FORTH: tl.constexpr):
    """From where to where, in steps of STEP, others stand that any of the places first..last sees; `size` others are.

    Phases 0 to 2 stand one behind the other; all of the places see all of phase 1, which so needs no mask; without
    BACK phase 0 is empty.  Phase 3 is all of these.
    """
    start, stop, whole, end = 0, size, 0, size
    if BACK >= 0:
        start = tl.maximum(first - BACK, 0) // STEP * STEP
        whole = tl.cdiv(tl.maximum(last - BACK, 0), STEP) * STEP
    if FORTH >= 0:
        stop = tl.minimum(tl.maximum(last + FORTH + 1, 0), size)
        end = tl.minimum(tl.maximum(first + FORTH + 1, 0), size)
    end = end // STEP * STEP
    if PHASE == 0:
        stop = tl.minimum(whole, stop)
    elif PHASE == 1:
        start, stop = whole, end
    elif PHASE == 2:
        start = tl.maximum(whole, end)
    return start, stop


@triton.jit
def load_ids(ids, stride, places, size):
    """Documents of some places; those from `size` on have that of the last."""
    return tl.load(ids + tl.minimum(places, size - 1).to(tl.int64) * stride)


@triton.jit
def near(ids, stride, start, stop, own):
    """`start` and `stop`, narrowed to others with a document between the smallest and the largest of `own`."""
    lowest, highest = tl.min(own, 0), tl.max(own, 0)
    first, last = stop, tl.minimum(start, stop)
    for chunk in range(start, stop, _CHUNK):
        places = chunk + tl.arange(0, _CHUNK)
        theirs = load_ids(ids, stride, places, stop)
        found = (theirs >= lowest) & (theirs <= highest) & (places < stop)
        first = tl.minimum(first, tl.min(tl.where(found, places, stop), 0))
        last = tl.maximum(last, tl.max(tl.where(found, places + 1, start), 0))
    return first, last


@triton.jit
def seen(rows, columns, queries, keys, shift, BACK: tl.constexpr, FORTH: tl.constexpr):
    """Which pairs see each other; rows and columns broadcast."""
    pairs = (rows < queries) & (columns < keys)
    if BACK >= 0:
        pairs &= rows + shift - columns <= BACK
    if FORTH >= 0:
        pairs &= columns - shift - rows <= FORTH
    return pairs


@triton.jit
def logits(a, b, scale, CAP: tl.constexpr):
    """log₂e · cap(a·b · scale); cap(x) is CAP · tanh(x / CAP)."""
    product = tl.dot(a, b, input_precision=PRECISION)
    if CAP > 0:
        away = tl.exp2(product * (scale * (2 * LOG2E / CAP)))
        result = (CAP * LOG2E) * (1 - 2 / (away + 1))  # tanh that cannot overflow
    else:
        result = product * (scale * LOG2E)
    return result


@triton.jit
def uncapped(gradient, logit, CAP: tl.constexpr):
    """The gradient of what `logits` caps, from that of its result: tanh' = 1 − tanh²."""
    if CAP > 0:
        tanh = logit * (1 / (CAP * LOG2E))
        gradient = gradient * (1 - tanh * tanh)
    return gradient
