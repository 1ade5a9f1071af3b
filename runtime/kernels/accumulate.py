"""Adds gradients of one element type to sums of a wider one, in one pass.

torch adds tensors of two element types one element at a time, without loads of 16 bytes.  It casts
tensors with such loads, so that casts need no kernel.
"""
# pyright: basic

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from . import launching
from .launching import Tile


@triton.jit
def accumulate_kernel(total, x, size, COLUMNS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * COLUMNS
    offsets = tl.arange(0, COLUMNS)
    mask = offsets < size - start
    total += start
    x += start
    added = tl.load(total + offsets, mask, other=0.0).to(tl.float32) + tl.load(
        x + offsets, mask, other=0.0
    ).to(tl.float32)
    tl.store(total + offsets, added.to(total.dtype.element_ty), mask)


@dataclass(frozen=True)
class Accumulate:
    """total += x, of one shape, in float32 at least; torch does it where both have one element type
    or total has gaps.

    Moves 10 bytes for each element of bfloat16 that is added to float32.
    """

    tile: Tile = Tile(rows=1, warps=4, columns=2048)

    def __call__(self, total: Tensor, x: Tensor) -> None:
        """Adds x to `total`, in place."""
        size = x.numel()
        same = total.dtype == x.dtype or not total.is_contiguous()
        if same or launching.tile_for(self, {size: self.tile}, size, total, x) is None:
            total.add_(x)
            return
        flat, added = total.view(-1), x.contiguous().view(-1)
        for span in launching.evenly(size):
            count = span.stop - span.start
            grid = (launching.blocks(count, self.tile.columns),)
            args = (flat[span], added[span], count)
            launching.launch(
                accumulate_kernel, grid, *args, warps=self.tile.warps, COLUMNS=self.tile.columns
            )
