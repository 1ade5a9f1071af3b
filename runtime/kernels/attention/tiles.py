"""Block sizes of the attention kernels, and loads of tiles."""
# pyright: basic

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True)
class Block:
    """What one program has at a time: `queries` × `keys` scores; powers of two, at least 16."""

    queries: int
    keys: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        """As kernels and `launch` name them."""
        return {"ROWS": self.queries, "COLUMNS": self.keys, "warps": self.warps, "stages": self.stages}


@dataclass(frozen=True)
class Blocks:
    """Blocks of the forward kernel, of that of k's and v's gradients, and of that of q's."""

    forward: Block
    keys: Block
    queries: Block


@triton.jit
def place(tiles, heads):
    """Tile, sample and head of this program, of as many as there are in all."""
    rest = tl.program_id(0) // tiles
    return tl.program_id(0) % tiles, (rest // heads).to(tl.int64), (rest % heads).to(tl.int64)


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
def load_tile(start, first, stride, size, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BOUNDED: tl.constexpr):
    """Rows of D elements from `first` on, [ROWS, DP]; zeros behind D and, if BOUNDED, in rows from `size` on.

    ROWS · stride is less than 2³¹; `size` · stride need not be.
    """
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DP)
    at = start + tl.cast(first, tl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    if BOUNDED and D < DP:
        tile = tl.load(at, mask=(first + rows < size)[:, None] & (dims < D)[None, :], other=0.0)
    elif BOUNDED:
        tile = tl.load(at, mask=(first + rows < size)[:, None], other=0.0)
    elif D < DP:
        tile = tl.load(at, mask=(dims < D)[None, :], other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def store_tile(start, tile, first, stride, size, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """The inverse of `load_tile`, in the dtype stored to."""
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DP)
    at = start + tl.cast(first, tl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    tl.store(at, tile.to(start.dtype.element_ty), mask=(first + rows < size)[:, None] & (dims < D)[None, :])
