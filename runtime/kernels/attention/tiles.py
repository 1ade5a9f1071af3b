"""Block sizes of the attention kernels, and loads of tiles."""
# pyright: basic  (Triton has no types)

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
def load_tile(start, rows, stride, size, D: tl.constexpr, DP: tl.constexpr, BOUNDED: tl.constexpr):
    """Rows of D elements as [rows, DP]; zeros behind D and, if BOUNDED, in rows from `size` on."""
    dims = tl.arange(0, DP)
    at = start + rows.to(tl.int64)[:, None] * stride + dims[None, :]
    if BOUNDED and D < DP:
        tile = tl.load(at, mask=(rows < size)[:, None] & (dims < D)[None, :], other=0.0)
    elif BOUNDED:
        tile = tl.load(at, mask=(rows < size)[:, None], other=0.0)
    elif D < DP:
        tile = tl.load(at, mask=(dims < D)[None, :], other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def store_tile(start, tile, rows, stride, size, D: tl.constexpr, DP: tl.constexpr):
    """The inverse of `load_tile`, in the dtype stored to."""
    dims = tl.arange(0, DP)
    at = start + rows.to(tl.int64)[:, None] * stride + dims[None, :]
    tl.store(at, tile.to(start.dtype.element_ty), mask=(rows < size)[:, None] & (dims < D)[None, :])
