"""The order of rows by expert: a counting sort of choices, in two passes over chunks of them.

The first counts the choices of each chunk for each group; sums of these counts say where the
chunk's rows of a group begin.  The second numbers the choices of one group within its chunk and
puts each in its place.  Nothing is added atomically, and choices of one group keep their order.
"""
# pyright: basic, reportGeneralTypeIssues=false

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...comm import experts
from ...comm.experts import Experts, Order, Sorted
from .. import launching
from ..launching import Tile, Tiled, blocks

PART = tl.constexpr(32)
"""The number of choices that are compared at a time."""


@triton.jit
def _groups(ids, slots, choice, size, last):
    """The groups of some choices.  An id of −1, and choices past `size`, have the group at the end
    of the table.
    """
    id = tl.load(ids + choice, mask=choice < size, other=-1)
    return tl.load(slots + tl.where(id < 0, last, id))


@triton.jit(do_not_specialize=["size", "last"])
def sort_count_kernel(
    ids, slots, counts, size, last,
    GROUPS: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """counts [GROUPS + 1, chunks] of a chunk's choices, for some of the groups; the last group has
    the choices without rows.
    """
    chunk, group = tl.program_id(0).to(tl.int64), tl.program_id(1) * BINS + tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    for part in range(0, ROWS, PART):
        choice = chunk * ROWS + part + tl.arange(0, PART)
        choice_groups = tl.where(choice < size, _groups(ids, slots, choice, size, last), -1)
        total += tl.sum((choice_groups[:, None] == group[None, :]).to(tl.int32), 0)
    tl.store(counts + group.to(tl.int64) * tl.num_programs(0) + chunk, total, mask=group <= GROUPS)


@triton.jit(do_not_specialize=["size", "last"])
def sort_place_kernel(
    ids, slots, starts, choices, rows, size, last,
    GROUPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    chunk, number = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS)
    choice = chunk * ROWS + number
    choice_groups = _groups(ids, slots, choice, size, last)
    before = tl.zeros([ROWS], tl.int32)
    for part in tl.static_range(0, ROWS, PART):
        other = part + tl.arange(0, PART)
        groups = _groups(ids, slots, chunk * ROWS + other, size, last)
        same = (choice_groups[:, None] == groups[None, :]) & (other[None, :] < number[:, None])
        before += tl.sum(same.to(tl.int32), 1)
    place = tl.load(starts + choice_groups * tl.num_programs(0) + chunk) + before
    tl.store(choices + place, choice, mask=choice < size)
    tl.store(rows + choice, tl.where(choice_groups < GROUPS, place, -1), mask=choice < size)


class SortByExpert(Tiled[Tile]):
    """`scalec.runtime.sort_by_expert`; tiles by the number of experts: choices of a chunk, and
    groups as columns.
    """

    def __call__(self, ids: Tensor, experts_: Experts, padded: int = 0) -> Order:
        """ids int64 [..., k]."""
        tile = self.tile_for(experts_.count, ids, dtypes=(torch.int64,))
        backend = experts.sort_choices if tile is None else partial(_sort_choices, tile=tile)
        return experts.sort_by_expert(ids, experts_, padded, backend)


def _sort_choices(ids: Tensor, slots: Tensor, groups: int, tile: Tile) -> Sorted:
    chunks = blocks(len(ids), tile.rows)
    counts = torch.empty(groups + 1, chunks, dtype=torch.int32, device=ids.device)
    choices, rows = torch.empty_like(ids), torch.empty_like(ids)
    how = {"GROUPS": groups, "ROWS": tile.rows, "warps": tile.warps}
    sizes = (len(ids), len(slots) - 1)
    grid = chunks, blocks(groups + 1, tile.columns)
    launching.launch(sort_count_kernel, grid, ids, slots, counts, *sizes, BINS=tile.columns, **how)
    starts = (counts.flatten().cumsum(0) - counts.flatten()).contiguous()
    launching.launch(sort_place_kernel, (chunks,), ids, slots, starts, choices, rows, *sizes, **how)
    return counts[:groups].sum(1), choices, rows
