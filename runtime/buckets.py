"""Flat buffers: the parameters of one bucket side by side, with their gradients and optimizer state.

Parameters and gradients are views, so that one collective reduces, and one kernel updates, a whole bucket.  Where ranks
share a bucket out, each keeps masters and optimizer state of one part, cut between rows of its tensors (the compiler's
`layout` has the rule), so that what it holds of a tensor is a box (ZeRO stage 1, Rajbhandari et al. 2020).

Non-goals: no choice of what goes together (the plan's), no communication (the program's).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import lcm, prod
from typing import Any, cast

import torch
from torch import Tensor, nn

from .mesh import Copies, Mesh, Role
from .optimizers import Group, Part
from .parameters import Spec, initialise


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a parameter lies in its bucket."""

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
        """The parameter and the global index of element `index` of the bucket, for instance `wq` and `[3, 5]`."""
        rest, at = index - self.start, list[int]()
        for size in reversed(self.shape):
            rest, place = divmod(rest, size)
            at.insert(0, place)
        return self.name, str([a + b for a, b in zip(at, self.spec.offsets(mesh), strict=True)])

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's part of a flat buffer of its bucket, in its own shape."""
        return flat[self.start : self.stop].view(self.shape)


@dataclass(frozen=True, slots=True)
class Record:
    """What this rank keeps of one tensor: some rows of its part of the whole, whose first index there is `offset`."""

    key: str
    spec: Spec
    offset: tuple[int, ...]
    local: Tensor


class Bucket:
    """One placement's parameters, of which the ranks along the axes `shards` keep a part each.

    `working` is what the model computes with, whole, and `gradient` its gradient; `master`, of the part, is what the
    optimizer updates: a copy in another dtype, or the same memory.
    """

    def __init__(
        self,
        groups: list[tuple[Group, dict[str, Spec]]],
        mesh: Mesh,
        dtype: torch.dtype,
        master: torch.dtype,
        slots: tuple[str, ...],
        shards: tuple[str, ...] = (),
    ) -> None:
        self.mesh, self.shards = mesh, shards
        axis = mesh.axis(*shards)
        self.groups: list[tuple[Group, slice]] = []
        self.pieces: list[Piece] = []
        for group, specs in groups:
            pieces = _lay_out(specs, mesh, self.pieces[-1].stop if self.pieces else 0, axis.size > 1)
            self.pieces += pieces
            self.groups.append((group, slice(pieces[0].start, pieces[-1].stop)))
        part = _part(self.pieces, axis.size)
        self.own = slice(axis.rank * part, (axis.rank + 1) * part)
        self.working = torch.zeros(part * axis.size, dtype=dtype, device=mesh.device)
        self.gradient = torch.zeros_like(self.working, dtype=master)
        self.is_mixed = dtype != master
        own = self.working[self.own]
        self.master = torch.zeros_like(own, dtype=master) if self.is_mixed else own
        self.slots = {slot: torch.zeros_like(self.master) for slot in slots}

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters, by name: views of `working`, whose gradients arrive in `gradient`."""
        for piece in self.pieces:
            parameter = nn.Parameter(piece.view(self.working))
            gradient = piece.view(self.gradient)
            if self.is_mixed:
                cast(Any, parameter).register_post_accumulate_grad_hook(_accumulate_into(gradient))
            else:
                parameter.grad = gradient  # autograd accumulates in place
            yield piece.name, parameter

    def parts(self) -> Iterator[Part]:
        """The optimizer's view: each group's slices of the flat buffers, as far as this rank keeps them."""
        for group, span in self.groups:
            start, stop = max(span.start, self.own.start), min(span.stop, self.own.stop)
            if start < stop:
                kept = slice(start - self.own.start, stop - self.own.start)
                slots = {slot: flat[kept] for slot, flat in self.slots.items()}
                yield Part(group, self.master[kept], self.gradient[start:stop], slots)

    def record(self) -> Iterator[Record]:
        """What a checkpoint holds: this rank's part of every parameter and slot."""
        for piece in self.pieces:
            for key, flat in ((piece.name, self.master), *self._slots_of(piece)):
                if rows := self._rows(piece):
                    first, *rest = piece.spec.offsets(self.mesh)
                    yield Record(key, piece.spec, (first + rows.start, *rest), self._kept(piece, rows, flat))

    def _slots_of(self, piece: Piece) -> Iterator[tuple[str, Tensor]]:
        yield from ((f"optimizer/{slot}/{piece.name}", flat) for slot, flat in self.slots.items())

    def _rows(self, piece: Piece) -> range:
        """Which rows of its part of a parameter this rank keeps: all, unless the bucket is shared out."""
        start, stop = max(piece.start, self.own.start), min(piece.stop, self.own.stop)
        first, last = (start - piece.start) // piece.row, (stop - piece.start) // piece.row
        return range(first, max(first, last))

    def _kept(self, piece: Piece, rows: range, flat: Tensor) -> Tensor:
        """Those rows in a buffer of what this rank keeps."""
        start = piece.start - self.own.start + rows.start * piece.row
        return flat[start : start + len(rows) * piece.row].view(len(rows), *piece.shape[1:])

    def copies(self) -> Iterator[Copies]:
        """Everything in its memory, in stretches that the same ranks hold alike."""
        flats: list[tuple[str, Role, Tensor]] = [
            ("", "kept", self.master),
            ("the gradient of ", "gradient", self.gradient[self.own]),
        ]
        for slot, flat in self.slots.items():
            flats.insert(0, (f"{slot} of ", "kept", flat))  # one that differs spoils its parameter: it is named first
        if self.is_mixed:
            flats.append(("the working copy of ", "working", self.working[self.own]))
        for split, group in groupby(self.pieces, lambda piece: {a for axes in piece.spec.split.values() for a in axes}):
            pieces = list(group)
            start, stop = max(pieces[0].start, self.own.start), min(pieces[-1].stop, self.own.stop)
            axis = self.mesh.without({*split, *self.shards})
            for what, role, flat in flats if start < stop else ():
                kept = flat[start - self.own.start : stop - self.own.start]
                yield Copies(kept, axis, role, what, partial(self._element, start))

    def _element(self, start: int, index: int) -> tuple[str, str]:
        piece = next(piece for piece in self.pieces if piece.start <= start + index < piece.stop)
        return piece.element(start + index, self.mesh)

    def initialise(self, seed: int) -> None:
        """Initial values of every parameter."""
        for piece in self.pieces:
            if rows := self._rows(piece):
                kept = self._kept(piece, rows, self.master)
                values = kept if kept.shape == piece.shape else kept.new_empty(piece.shape)
                initialise(values, piece.spec, self.mesh, seed, piece.name)
                kept.copy_(values[rows.start : rows.stop])
        self.refresh()

    def fill(self, value: Callable[[str, Spec], Tensor]) -> None:
        """Values of every parameter, given as the part of it that its spec says."""
        for piece in self.pieces:
            if rows := self._rows(piece):
                self._kept(piece, rows, self.master).copy_(value(piece.name, piece.spec)[rows.start : rows.stop])
        self.refresh()

    def refresh(self) -> None:
        """Brings this rank's part of `working` up to date with `master`."""
        if self.is_mixed:
            self.working[self.own].copy_(self.master)


def _lay_out(specs: dict[str, Spec], mesh: Mesh, start: int, by_rows: bool) -> list[Piece]:
    """The parameters one after another, from `start` on, each perhaps at a multiple of its row's length."""
    pieces: list[Piece] = []
    for name, spec in specs.items():
        shape = spec.local_shape(mesh)
        row = prod(shape[1:]) if by_rows else 1
        pieces.append(Piece(name, spec, shape, -(-start // row) * row))
        start = pieces[-1].stop
    return pieces


def _part(pieces: list[Piece], shards: int) -> int:
    """The size of one of `shards` equal parts, which begin and end between rows."""
    unit = lcm(*(piece.row for piece in pieces)) if shards > 1 else 1
    return -(-pieces[-1].stop // (shards * unit)) * unit


def _accumulate_into(total: Tensor) -> Callable[[Tensor], None]:
    """A hook that adds a parameter's gradient to `total`, which is wider, and frees it."""

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None, "state: a post-accumulate hook without a gradient"
        total.add_(parameter.grad)
        parameter.grad = None

    return hook
