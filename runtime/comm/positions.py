"""The positions of a sequence that a rank holds, where mesh axes shard it, contiguous or zigzag."""

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import product

import torch
from torch import Tensor

from .mesh import Mesh

Cut = tuple[int, int, bool]
"""One axis' cut: its ranks, this rank, whether it is a zigzag."""


@cache
def chunks(size: int, cuts: tuple[Cut, ...]) -> tuple[tuple[int, int], ...]:
    """(start, length) of the runs of consecutive positions that a rank holds of `size`, in its
    order.

    The first cut is the outermost; each cuts what the one before leaves, in the order in which that
    leaves it.  A zigzag cuts for n ranks 2n pieces, of which rank r holds r and 2n − 1 − r.
    """
    runs = [(0, size)]
    for ranks, rank, zigzag in cuts:
        pieces = (rank, 2 * ranks - 1 - rank) if zigzag else (rank,)
        piece_length, remainder = divmod(sum(length for _, length in runs), len(pieces) * ranks)
        assert not remainder, f"positions: {size} cannot be cut as {cuts}"
        runs = [run for piece in pieces for run in _part(runs, piece * piece_length, piece_length)]
    merged: list[tuple[int, int]] = []
    for start, length in runs:
        if merged and sum(merged[-1]) == start:
            start, length = merged[-1][0], merged.pop()[1] + length
        merged.append((start, length))
    return tuple(merged)


def _part(runs: Sequence[tuple[int, int]], first: int, count: int) -> list[tuple[int, int]]:
    """`count` of the runs' positions from the one numbered `first` on."""
    part: list[tuple[int, int]] = []
    for start, length in runs:
        low, high = max(first, 0), min(first + count, length)
        if low < high:
            part.append((start + low, high - low))
        first -= length
    return part


@cache
def to_ranks(ranks: int) -> tuple[int, ...]:
    """The 2n pieces of a zigzag in the order in which n ranks hold them: 0, 2n − 1, 1, 2n − 2, …"""
    return tuple(piece for rank in range(ranks) for piece in (rank, 2 * ranks - 1 - rank))


@cache
def from_ranks(ranks: int) -> tuple[int, ...]:
    """The inverse of `to_ranks`: where each of the 2n pieces lies among those of all ranks."""
    order = to_ranks(ranks)
    return tuple(order.index(piece) for piece in range(2 * ranks))


class Positions:
    """The positions, of a dim of `size`, that this rank holds where the named mesh axes shard it,
    outermost first.

    `chunks` has (start, length) of each run of them, in this rank's order; `local` is how many
    there are.  Axes named in `zigzag` cut 2n pieces for n ranks, of which rank r holds r and 2n − 1
    − r; other axes cut n.
    """

    __slots__ = ("_axes", "_mesh", "chunks", "local", "size")

    def __init__(self, mesh: Mesh, size: int, *axes: str, zigzag: Collection[str] = ()) -> None:
        self.size = size
        self._mesh, self._axes = mesh, {name: name in zigzag for name in axes}
        self.chunks = self._chunks({name: mesh.rank(name) for name in axes})
        self.local = sum(length for _, length in self.chunks)

    def _chunks(self, place: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
        cuts = ((self._mesh.size(name), place[name], zigzag) for name, zigzag in self._axes.items())
        return chunks(self.size, tuple(cuts))

    def of_ranks(self) -> list[tuple[tuple[int, int], ...]]:
        """The `chunks` of each rank of the axes as one, `mesh.axis(*axes)`."""
        names = [name for name in self._mesh.axes if name in self._axes]
        places = product(*(range(self._mesh.size(name)) for name in names))
        return [self._chunks(dict(zip(names, place, strict=True))) for place in places]

    def indices(self, device: torch.device) -> Tensor:
        """The positions, int64 [local]."""
        return torch.cat(
            [torch.arange(start, start + length, device=device) for start, length in self.chunks]
        )


def position_ids(mesh: Mesh, size: int, *axes: str, zigzag: Collection[str] = ()) -> Tensor:
    """The positions of a dim of `size` that this rank holds, as `Positions` has them: int64, in
    this rank's order.
    """
    return Positions(mesh, size, *axes, zigzag=zigzag).indices(mesh.device)
