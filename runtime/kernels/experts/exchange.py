"""Rows that came from other ranks in the order of experts, and the places that say so.

    arranged[here + i] = there + i        returned[there + i] = here + i        for the i-th row
        of a rank and an expert

Rows lie by rank and expert where they came, from `there` on, and by expert and rank where they go,
from `here` on.
"""
# pyright: basic, reportGeneralTypeIssues=false

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...comm import exchange, experts
from ...comm.exchange import Regroup
from ...comm.experts import ExpertRows, Order
from .. import launching
from ..launching import Tile, Tiled, blocks, matrix, next_power_of_two


@triton.jit
def group_places_kernel(
    counts, arranged, returned,
    GROUPS: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program for each rank and expert, which sums up what lies before its rows."""
    group, other = tl.program_id(0), tl.arange(0, PADDED)
    expert = group % EXPERTS
    count = tl.load(counts + other, mask=other < GROUPS, other=0)
    there = tl.sum(tl.where(other < group, count, 0), 0)
    earlier = (other % EXPERTS < expert) | ((other % EXPERTS == expert) & (other < group))
    here = tl.sum(tl.where(earlier, count, 0), 0)
    size = tl.load(counts + group)
    for first in range(0, size, ROWS):
        number = first + tl.arange(0, ROWS)
        tl.store(arranged + here + number, there + number, mask=number < size)
        tl.store(returned + there + number, here + number, mask=number < size)


@triton.jit(do_not_specialize=["size"])
def regroup_kernel(
    rows, places, out, stride, size,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < size)[:, None] & (column < WIDTH)
    source = tl.load(places + row, mask=row < size, other=0)[:, None]
    tl.store(
        out + row[:, None] * WIDTH + column,
        tl.load(rows + source * stride + column, mask=inside),
        mask=inside,
    )


class ExchangeCounts(Tiled[Tile]):
    """`scalec.runtime.exchange_counts`; tiles by the number of experts, with as many rows as
    are placed at a time.
    """

    def __call__(self, order: Order) -> ExpertRows:
        """The rows of this rank's experts."""
        tile = self.tile_for(order.experts.count, order.counts, dtypes=(torch.int64,))
        backend = experts.places if tile is None else partial(_places, tile=tile)
        return experts.exchange_counts(order, backend)


class Exchange(Tiled[Tile]):
    """`scalec.runtime.exchange`; tiles by the width of rows.  Saves nothing."""

    def __call__(self, rows: Tensor, expert_rows: ExpertRows, async_op: bool = False) -> Any:
        """[rows of tokens, h] → [rows of experts, h]."""
        return exchange.start_exchange(rows, expert_rows, False, async_op, _regroup(self, rows))


class ExchangeBack(Tiled[Tile]):
    """`scalec.runtime.exchange_back`; tiles by the width of rows.  Saves nothing."""

    def __call__(self, rows: Tensor, expert_rows: ExpertRows, async_op: bool = False) -> Any:
        """[rows of experts, h] → [rows of tokens, h]."""
        return exchange.start_exchange(rows, expert_rows, True, async_op, _regroup(self, rows))


def _places(counts: Tensor, total: int, tile: Tile) -> tuple[Tensor, Tensor]:
    arranged = torch.empty(total, dtype=torch.int64, device=counts.device)
    returned = torch.empty(total, dtype=torch.int64, device=counts.device)
    groups, local_experts = counts.numel(), counts.shape[1]
    launching.launch(
        group_places_kernel,
        (groups,),
        *(counts.contiguous(), arranged, returned),
        GROUPS=groups,
        EXPERTS=local_experts,
        PADDED=next_power_of_two(groups),
        ROWS=tile.rows,
        warps=tile.warps,
    )
    return arranged, returned


def _regroup(op: Tiled[Tile], rows: Tensor) -> Regroup:
    tile = op.tile_for(rows.shape[-1], rows)
    if tile is None:
        return exchange.regroup_rows
    return partial(_regroup_by_kernel, tile=tile)


def _regroup_by_kernel(rows: Tensor, places: Tensor, tile: Tile) -> Tensor:
    width = rows.shape[-1]
    rows, out = matrix(rows, width), rows.new_empty(rows.shape)
    launching.launch(
        regroup_kernel,
        (blocks(len(rows), tile.rows), blocks(width, tile.across(width))),
        *(rows, places, out, rows.stride(0), len(rows)),
        **tile.options(width, tile.across(width)),
    )
    return out
