"""Where parameters lie in a flat buffer, and which of their rows each rank keeps where ranks share
it out.

The parts are equal and cut between rows of tensors, by the same rule as the compiler's
`bucket_layout`, so that a rank's part of a tensor is a box (ZeRO stage 1, Rajbhandari et al. 2020).

Non-goals: no memory (`flat_param`), no choice of what goes together (the plan's).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm, prod

from torch import Tensor

from ..comm.mesh import Axis, Mesh
from .buckets import Claim, Claims
from .optimizers import ParamGroup
from .parameters import Spec


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a parameter lies in its buffer."""

    name: str
    spec: Spec
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.start + prod(self.shape)

    @property
    def row(self) -> int:
        """The elements in one index of its first dim."""
        return prod(self.shape[1:])

    def element(self, index: int, mesh: Mesh) -> tuple[str, str]:
        """The parameter and the global index of element `index` of the buffer, for instance
        `wq` and `[3, 5]`.
        """
        remainder, indices = index - self.start, list[int]()
        sizes_and_offsets = [*zip(self.shape, self.spec.offsets(mesh), strict=True)]
        for size, offset in reversed(sizes_and_offsets):
            remainder, local = divmod(remainder, size)
            indices.insert(0, offset + local)
        return self.name, str(indices)

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's part of a buffer, in its own shape."""
        return flat[self.start : self.stop].view(self.shape)


class Layout:
    """Parameters side by side in `size` elements; this rank of the axis keeps the elements in
    `own`.
    """

    def __init__(self, claims: Claims, mesh: Mesh, axis: Axis) -> None:
        self.groups: list[tuple[ParamGroup, slice]] = []
        self.pieces: list[Piece] = []
        for group, claimed in claims:
            start = self.pieces[-1].stop if self.pieces else 0
            pieces = _lay_out(claimed, mesh, start, by_rows=axis.size > 1)
            self.pieces += pieces
            if pieces:  # a rank's stages may have none of a group
                self.groups.append((group, slice(pieces[0].start, pieces[-1].stop)))
        self.part = _part(self.pieces, axis.size)
        self.size = self.part * axis.size
        self.own = slice(axis.rank * self.part, (axis.rank + 1) * self.part)

    def overlap_with_own(self, start: int, stop: int) -> slice | None:
        """This rank's part of a stretch, as a slice of its own buffer; None if it has nothing
        of it.
        """
        start, stop = max(start, self.own.start), min(stop, self.own.stop)
        if start >= stop:
            return None
        return slice(start - self.own.start, stop - self.own.start)

    def rows(self, piece: Piece) -> range:
        """Which rows of its part of a parameter this rank keeps: all, unless the buffer is
        shared out.
        """
        if (kept := self.overlap_with_own(piece.start, piece.stop)) is None:
            return range(0)
        before = self.own.start - piece.start
        return range((kept.start + before) // piece.row, (kept.stop + before) // piece.row)

    def get_own_rows(self, piece: Piece, part: Tensor) -> Tensor:
        """The rows of a parameter that this rank keeps, in its own buffer; it keeps some."""
        kept, rows = self.overlap_with_own(piece.start, piece.stop), self.rows(piece)
        assert kept is not None, f"layout: this rank keeps nothing of `{piece.name}`"
        return part[kept].view(len(rows), *piece.shape[1:])

    def piece_at(self, index: int) -> Piece:
        """The parameter that has this element of the buffer."""
        return next(piece for piece in self.pieces if piece.start <= index < piece.stop)


def _lay_out(claimed: Sequence[Claim], mesh: Mesh, start: int, by_rows: bool) -> list[Piece]:
    """The parameters one after another, from `start` on; `by_rows`, each begins at a multiple of
    its row's length.
    """
    pieces: list[Piece] = []
    for parameter in claimed:
        shape = parameter.spec.local_shape(mesh)
        row = prod(shape[1:]) if by_rows else 1
        pieces.append(Piece(parameter.name, parameter.spec, shape, -(-start // row) * row))
        start = pieces[-1].stop
    return pieces


def _part(pieces: list[Piece], ranks: int) -> int:
    """The size of one of `ranks` equal parts, which begin and end between rows."""
    unit = 1
    if ranks > 1:
        unit = lcm(*(piece.row for piece in pieces))
    stop = pieces[-1].stop if pieces else 0
    return -(-stop // (ranks * unit)) * unit
