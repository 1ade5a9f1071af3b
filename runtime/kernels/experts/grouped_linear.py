"""A linear layer for each expert: products of blocks of rows that are all of one expert, in
float32.

    y = x · weight[e]ᵀ        dx = dy · weight[e]        dweight[e] = dyᵀ · x over the rows of e

Rows have no gaps between experts: the last block of each is cut.  A program of dweight goes over
all rows of its expert, so that nothing is added by two of them.
"""
# pyright: basic, reportGeneralTypeIssues=false

from dataclasses import dataclass
from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from ...comm.experts import Groups
from ...ops import grouped_linear
from ...ops.grouped_linear import PLAIN, Backend
from .. import launching
from ..attention.tiles import PRECISION
from ..launching import Tiled, blocks, matrix, next_power_of_two


@dataclass(frozen=True)
class Product:
    """A block of a product: rows and columns of its result, and how many terms of its sums are
    loaded at a time.
    """

    rows: int
    columns: int
    terms: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        """The constants of the kernels and the options of `launch`, by name."""
        sizes = {"ROWS": self.rows, "COLUMNS": self.columns, "TERMS": self.terms}
        return sizes | {"warps": self.warps, "stages": self.stages}


@dataclass(frozen=True)
class Products:
    """The blocks of the products for rows, y and dx, and of the product for dweight."""

    of_rows: Product
    of_weight: Product


@triton.jit(do_not_specialize=["experts"])
def group_rows_kernel(
    x, weight, ends, out, x_stride, w_expert, w_term, w_column, experts,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """x [rows, DEPTH] · weight [experts, DEPTH, WIDTH]: a block of rows of one expert, by some
    columns.
    """
    expert = tl.arange(0, EXPERTS)
    valid = expert < experts
    end = tl.load(ends + expert, mask=valid, other=0)
    start = tl.load(ends + expert - 1, mask=valid & (expert > 0), other=0)
    count = tl.where(valid, tl.cdiv(end - start, ROWS), 0)
    block_ends = tl.cumsum(count, 0)
    block = tl.program_id(0) // tl.cdiv(WIDTH, COLUMNS)
    selected = valid & (block_ends > block) & (block_ends - count <= block)
    block_expert = tl.sum(tl.where(selected, expert, 0), 0)
    first = tl.sum(tl.where(selected, start + (block - block_ends + count) * ROWS, 0), 0)
    row = first + tl.arange(0, ROWS)
    inside = row < tl.sum(tl.where(selected, end, 0), 0)
    column = tl.program_id(0) % tl.cdiv(WIDTH, COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    term = tl.arange(0, TERMS)
    x += row.to(tl.int64)[:, None] * x_stride + term[None, :]
    weight += block_expert.to(tl.int64) * w_expert
    weight += term.to(tl.int64)[:, None] * w_term + column.to(tl.int64)[None, :] * w_column
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for offset in range(0, DEPTH, TERMS):
        remaining = term < DEPTH - offset
        x_tile = tl.load(x, mask=inside[:, None] & remaining[None, :], other=0.0)
        w_tile = tl.load(weight, mask=remaining[:, None] & (column < WIDTH)[None, :], other=0.0)
        sums = tl.dot(x_tile, w_tile, sums, input_precision=PRECISION)
        x += TERMS
        weight += TERMS * w_term
    out += row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(out, sums.to(out.dtype.element_ty), mask=inside[:, None] & (column < WIDTH)[None, :])


@triton.jit
def group_weight_kernel(
    gradient, x, ends, out, gradient_stride, x_stride,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """gradient [rows, HEIGHT]ᵀ · x [rows, WIDTH] over the rows of one expert: a block of
    [experts, HEIGHT, WIDTH].
    """
    blocks = tl.cdiv(HEIGHT, ROWS) * tl.cdiv(WIDTH, COLUMNS)
    expert, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    end = tl.load(ends + expert)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    row = block // tl.cdiv(WIDTH, COLUMNS) * ROWS + tl.arange(0, ROWS)
    column = block % tl.cdiv(WIDTH, COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    term = start.to(tl.int64) + tl.arange(0, TERMS)
    gradient += term[None, :] * gradient_stride + row[:, None]
    x += term[:, None] * x_stride + column[None, :]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for offset in range(start, end, TERMS):
        remaining = tl.arange(0, TERMS) < end - offset
        g_tile = tl.load(gradient, mask=(row < HEIGHT)[:, None] & remaining[None, :], other=0.0)
        x_tile = tl.load(x, mask=remaining[:, None] & (column < WIDTH)[None, :], other=0.0)
        sums = tl.dot(g_tile, x_tile, sums, input_precision=PRECISION)
        gradient += TERMS * gradient_stride
        x += TERMS * x_stride
    out += (expert.to(tl.int64) * HEIGHT + row[:, None]) * WIDTH + column[None, :]
    tl.store(
        out, sums.to(out.dtype.element_ty), mask=(row < HEIGHT)[:, None] & (column < WIDTH)[None, :]
    )


class GroupedLinear(Tiled[Products]):
    """`scalec.runtime.grouped_linear`, by torch where that has a kernel; tiles by the width of x.

    Saves both.
    """

    def __call__(self, x: Tensor, weight: Tensor, groups: Groups | None = None) -> Tensor:
        """x [rows, i] or [experts, rows, i], weight [experts, o, i] → [rows, o] or [experts,
        rows, o].
        """
        tile = self.tile_for(x.shape[-1], x, weight)
        backend = PLAIN
        if tile is not None:
            backend = Backend(
                partial(_products, block=tile.of_rows), partial(_of_weight, block=tile.of_weight)
            )
        return grouped_linear.grouped_linear(x, weight, groups, backend)


def _products(x: Tensor, weight: Tensor, groups: Groups | None, block: Product) -> Tensor:
    if groups is None or grouped_linear.is_for_grouped_mm(x, weight):
        return PLAIN.products(x, weight, groups)
    depth, width = weight.shape[1:]
    x, out = matrix(x, depth), x.new_empty((len(x), width))
    launching.launch(
        group_rows_kernel,
        (sum(blocks(size, block.rows) for size in groups.sizes) * blocks(width, block.columns),),
        *(x, weight, groups.ends, out, x.stride(0), *weight.stride(), len(weight)),
        WIDTH=width,
        DEPTH=depth,
        EXPERTS=next_power_of_two(len(weight)),
        **block.options(),
    )
    return out


def _of_weight(gradient: Tensor, x: Tensor, groups: Groups | None, block: Product) -> Tensor:
    if groups is None or grouped_linear.is_for_grouped_mm(gradient, x):
        return PLAIN.of_weight(gradient, x, groups)
    height, width = gradient.shape[-1], x.shape[-1]
    gradient, x = matrix(gradient, height), matrix(x, width)
    out = x.new_empty((len(groups.sizes), height, width))
    launching.launch(
        group_weight_kernel,
        (len(out) * blocks(height, block.rows) * blocks(width, block.columns),),
        *(gradient, x, groups.ends, out, gradient.stride(0), x.stride(0)),
        HEIGHT=height,
        WIDTH=width,
        **block.options(),
    )
    return out
