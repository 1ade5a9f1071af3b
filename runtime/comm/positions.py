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

    The first cut is the outermost; each later one cuts the positions that the cut before it leaves,
    in their order.  For n ranks a zigzag cuts 2n pieces: rank r holds pieces r and 2n − 1 − r.
    """
    runs = [(0, size)]
    for ranks, rank, zigzag in cuts:
        pieces = (rank,)
        if zigzag:
            pieces = (rank, 2 * ranks - 1 - rank)
        piece_length, remainder = divmod(sum(length for _, length in runs), len(pieces) * ranks)
        assert not remainder, f"positions: {size} cannot be cut as {cuts}"
        held_runs: list[tuple[int, int]] = []
        for piece in pieces:
            held_runs += _part(runs, piece * piece_length, piece_length)
        runs = held_runs
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
    """The 2n pieces of a zigzag, rank by rank: 0, 2n − 1, 1, 2n − 2, …"""
    pieces: list[int] = []  # dynamo, which traces this, knows no `list[int]()`
    for rank in range(ranks):
        pieces += [rank, 2 * ranks - 1 - rank]
    return tuple(pieces)


@cache
def from_ranks(ranks: int) -> tuple[int, ...]:
    """The inverse of `to_ranks`: where each of the 2n pieces lies among the pieces of all ranks."""
    order = to_ranks(ranks)
    return tuple(order.index(piece) for piece in range(2 * ranks))


class Positions:
    """The positions, of a dim of `size`, that this rank holds where the named mesh axes shard it,
    outermost first.

    `chunks` has (start, length) of each run of them, in this rank's order; `local` is how many
    positions there are.  Axes named in `zigzag` cut 2n pieces for n ranks, and rank r holds pieces
    r and 2n − 1 − r; other axes cut n.
    """

    __slots__ = ("_axes", "_mesh", "chunks", "local", "size")

    def __init__(self, mesh: Mesh, size: int, *axes: str, zigzag: Collection[str] = ()) -> None:
        self.size = size
        self._mesh, self._axes = mesh, {name: name in zigzag for name in axes}
        self.chunks = self._chunks({name: mesh.rank(name) for name in axes})
        self.local = sum(length for _, length in self.chunks)

    def _chunks(self, place: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
        cuts: list[Cut] = []
        for name, zigzag in self._axes.items():
            cuts.append((self._mesh.size(name), place[name], zigzag))
        return chunks(self.size, tuple(cuts))

    def of_ranks(self) -> list[tuple[tuple[int, int], ...]]:
        """The `chunks` of each rank of the axes as one, `mesh.axis(*axes)`."""
        names = [name for name in self._mesh.axes if name in self._axes]
        sizes = [self._mesh.size(name) for name in names]
        chunks_by_rank: list[tuple[tuple[int, int], ...]] = []
        for place in product(*map(range, sizes)):
            chunks_by_rank.append(self._chunks(dict(zip(names, place, strict=True))))
        return chunks_by_rank

    def indices(self, device: torch.device) -> Tensor:
        """The positions, int64 [local]."""
        runs: list[Tensor] = []
        for start, length in self.chunks:
            runs.append(torch.arange(start, start + length, device=device))
        return torch.cat(runs)


def position_ids(mesh: Mesh, size: int, *axes: str, zigzag: Collection[str] = ()) -> Tensor:
    """The positions of a dim of `size` that this rank holds, as `Positions` has them: int64, in
    this rank's order.
    """
    return Positions(mesh, size, *axes, zigzag=zigzag).indices(mesh.device)
