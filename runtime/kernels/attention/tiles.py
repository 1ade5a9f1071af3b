"""Block sizes of the attention kernels, strides and constants of a call, loads of tiles, masks,
soft-capped scores.

The query of row r is at key r + shift, and sees from BACK before that to FORTH after it; a negative
BACK or FORTH is no limit.
"""
# pyright: basic

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ...ops.plain_attention import Setting
from .. import launching

LOG2E = tl.constexpr(1.4426950408889634)
PRECISION = tl.constexpr("tf32x3")
"""Products in float32 by tensor cores: the product of both factors' upper 11 bits, and of the upper
bits of each with the lower bits of the other.
"""

_CHUNK = tl.constexpr(1024)
_FAR = 2**31 // 256
"""Inside of a tile of at most 256 tokens, kernels count elements in 32 bits."""


@triton.jit
def span(
    PHASE: tl.constexpr,
    first,
    last,
    size,
    STEP: tl.constexpr,
    BACK: tl.constexpr,
    FORTH: tl.constexpr,
):
    """The range of others, in steps of STEP, that any of the places first..last sees; there are
    `size` others.

    Phases 0 to 2 follow each other; all of the places see all of phase 1, which so needs no mask;
    without BACK phase 0 is empty.  Phase 3 is all of these.
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
    """Documents of some places; places from `size` on have the last place's document."""
    return tl.load(ids + tl.minimum(places, size - 1).to(tl.int64) * stride)


@triton.jit
def near(ids, stride, start, stop, tile_ids):
    """`start` and `stop`, narrowed to others with a document between the smallest and the
    largest of `tile_ids`.
    """
    lowest, highest = tl.min(tile_ids, 0), tl.max(tile_ids, 0)
    first, last = stop, tl.minimum(start, stop)
    for chunk in range(start, stop, _CHUNK):
        places = chunk + tl.arange(0, _CHUNK)
        other_ids = load_ids(ids, stride, places, stop)
        matches = (other_ids >= lowest) & (other_ids <= highest) & (places < stop)
        first = tl.minimum(first, tl.min(tl.where(matches, places, stop), 0))
        last = tl.maximum(last, tl.max(tl.where(matches, places + 1, start), 0))
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
def gradient_before_cap(gradient, logit, CAP: tl.constexpr):
    """The gradient before the cap of `logits`, from the gradient after it: tanh' = 1 − tanh²."""
    if CAP > 0:
        tanh = logit * (1 / (CAP * LOG2E))
        gradient = gradient * (1 - tanh * tanh)
    return gradient


@dataclass(frozen=True)
class Block:
    """The scores of one program at a time: `queries` × `keys`; powers of two, at least 16."""

    queries: int
    keys: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        """The constants of the kernels and the options of `launch`, by name."""
        return {
            "ROWS": self.queries,
            "COLUMNS": self.keys,
            "warps": self.warps,
            "stages": self.stages,
        }


@dataclass(frozen=True)
class Blocks:
    """Blocks of the three kernels: forward, the gradients of k and v, and the gradient of q."""

    forward: Block
    keys: Block
    queries: Block


def strides(x: Tensor, seq: int) -> tuple[int, int, int]:
    """Elements from sample to sample, from token to token and from head to head."""
    assert x.stride(seq) < _FAR, f"attention: {x.stride(seq)} elements from token to token"
    return x.stride(1 - seq), x.stride(seq), x.stride(2)


def unit(x: Tensor) -> Tensor:
    """x, or a copy where neighbours along its last dim are not neighbours in memory."""
    if x.stride(-1) == 1:
        return x
    return x.contiguous()


def tile_width(dim: int) -> int:
    """The width of tiles: the next power of two, and as much as a product of matrices needs."""
    return max(launching.next_power_of_two(dim), 16)


def operand_strides(
    q: Tensor, k: Tensor, v: Tensor, q_ids: Tensor | None, k_ids: Tensor | None, seq: int
) -> tuple[int, ...]:
    """Strides of q, k and v between samples, tokens and heads; strides of documents between samples
    and tokens.
    """
    all_strides = [*strides(q, seq), *strides(k, seq), *strides(v, seq)]
    for ids in (q_ids, k_ids):
        if ids is None:
            all_strides += [0, 0]
        else:
            all_strides += [ids.stride(1 - seq), ids.stride(seq)]
    return tuple(all_strides)


def constants(
    how: Setting, q: Tensor, k: Tensor, ids: Tensor | None
) -> dict[str, int | float | bool]:
    """The constants that kernels are compiled for."""
    dim = q.shape[-1]
    return {
        "GROUP": q.shape[2] // k.shape[2],
        "D": dim,
        "DP": tile_width(dim),
        "BACK": how.back,
        "FORTH": how.forth,
        "CAP": how.cap,
        "DOCUMENTS": ids is not None,
    }


@triton.jit
def place(tiles, heads):
    """Tile, sample and head of this program, of as many as there are in all."""
    sample_and_head = tl.program_id(0) // tiles
    return (
        tl.program_id(0) % tiles,
        (sample_and_head // heads).to(tl.int64),
        (sample_and_head % heads).to(tl.int64),
    )


@triton.jit
def load_row(start, first, size, ROWS: tl.constexpr, BOUNDED: tl.constexpr):
    """Numbers from `first` on, [ROWS]; zeros from `size` on if BOUNDED."""
    rows = first + tl.arange(0, ROWS)
    return tl.load(start + rows, mask=rows < size, other=0.0) if BOUNDED else tl.load(start + rows)


@triton.jit
def store_row(start, row, first, size, ROWS: tl.constexpr):
    """The inverse of `load_row`."""
    rows = first + tl.arange(0, ROWS)
    tl.store(start + rows, row, mask=rows < size)


@triton.jit
def load_tile(
    start,
    first,
    stride,
    size,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Rows of D elements from `first` on, [ROWS, DP]; zeros after D and, if BOUNDED, in rows from
    `size` on.

    ROWS · stride is less than 2³¹; `size` · stride need not be.
    """
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DP)
    pointers = start + tl.cast(first, tl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    if BOUNDED and D < DP:
        tile = tl.load(
            pointers, mask=(first + rows < size)[:, None] & (dims < D)[None, :], other=0.0
        )
    elif BOUNDED:
        tile = tl.load(pointers, mask=(first + rows < size)[:, None], other=0.0)
    elif D < DP:
        tile = tl.load(pointers, mask=(dims < D)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def store_tile(
    start, tile, first, stride, size, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr
):
    """The inverse of `load_tile`, in the dtype stored to."""
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DP)
    pointers = start + tl.cast(first, tl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    tl.store(
        pointers,
        tile.to(start.dtype.element_ty),
        mask=(first + rows < size)[:, None] & (dims < D)[None, :],
    )
