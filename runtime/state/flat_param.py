"""Flat buffers: the parameters of one turn side by side, with their gradients and optimizer state.

Parameters and gradients are views, so that one collective gathers or reduces, and one kernel updates, them all.

Non-goals: where what lies (`layout`), whose memory it is (`buckets`), no communication (`flows`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import Any, cast

from torch import Tensor, nn

from ..comm.mesh import Copies, Mesh, Role
from ..ops.fused_linear import join
from .grad_reduction import Gradient, accumulate_into
from .layout import Layout, Piece
from .parameters import Spec, initialise
from .unsharded import Working


@dataclass(frozen=True, slots=True)
class Record:
    """What this rank keeps of one tensor: some rows of its part of the whole, whose first index there is `offset`."""

    key: str
    spec: Spec
    offset: tuple[int, ...]
    local: Tensor


class FlatParam:
    """One turn of a bucket, a chunk, or the whole of one; ranks along the axes `apart` hold other parts or parameters.

    `place` is the turn's index in each repeat, or the stages that a chunk is of; in its order buffers are gathered.
    The optimizer updates `master`, of the part: `working`'s own, or a copy in another dtype.  Of `products` those whose
    weights are here have them as one matrix.
    """

    def __init__(
        self,
        place: tuple[int, ...],
        layout: Layout,
        mesh: Mesh,
        apart: Collection[str],
        working: Working,
        gradient: Gradient,
        master: Tensor,
        slots: Mapping[str, Tensor],
        products: Sequence[tuple[str, ...]] = (),
    ) -> None:
        self.place, self.layout, self.mesh, self.apart = place, layout, mesh, {*apart}
        self.working, self.gradient, self.master, self.slots = working, gradient, master, slots
        self.is_mixed = master.dtype != working.whole.dtype
        self.parameters = dict(self._parameters())
        for names in products:
            if names[0] in self.parameters:
                self._join(names)
        working.free()  # of memory that views cannot be made without

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters, by name: views of the working weights, whose gradients arrive in `gradient`."""
        # `data`, whose versions autograd counts apart: a gather in backward brings back the values of forward.
        whole = self.working.whole.data
        for piece in self.layout.pieces:
            parameter = nn.Parameter(piece.view(whole))
            if self.is_mixed or self.gradient.by_parts:
                hook = accumulate_into(self.gradient, piece.view)
                cast(Any, parameter).register_post_accumulate_grad_hook(hook)
            else:
                parameter.grad = piece.view(self.gradient.kept)  # autograd accumulates in place
            yield piece.name, parameter

    def _join(self, names: Sequence[str]) -> None:
        """Lets `fused_linear` have neighbours, which are rows of one length, as one matrix."""
        pieces = [piece for piece in self.layout.pieces if piece.name in names]
        first, last = pieces[0], pieces[-1]
        assert [piece.name for piece in pieces] == [*names], f"flat: {names} of one product lie in another order"
        assert {piece.shape[1:] for piece in pieces} == {(first.row,)}, f"flat: {names} differ in their rows"
        assert all(a.stop == b.start for a, b in pairwise(pieces)), f"flat: {names} are no neighbours"
        join(self.parameters[first.name], self.working.whole.data[first.start : last.stop].view(-1, first.row))

    def record(self) -> Iterator[Record]:
        """What a checkpoint holds: this rank's part of every parameter and slot."""
        for piece in self.layout.pieces:
            for key, flat in ((piece.name, self.master), *self._slots_of(piece)):
                if rows := self.layout.rows(piece):
                    first, *rest = piece.spec.offsets(self.mesh)
                    offset = (first + rows.start, *rest)
                    yield Record(key, piece.spec, offset, self.layout.kept_rows(piece, flat))

    def _slots_of(self, piece: Piece) -> Iterator[tuple[str, Tensor]]:
        yield from ((f"optimizer/{slot}/{piece.name}", flat) for slot, flat in self.slots.items())

    def copies(self) -> Iterator[Copies]:
        """Everything in its memory, in stretches that the same ranks hold alike."""
        flat_params: list[tuple[str, Role, Tensor]] = [
            ("", "kept", self.master),
            ("the gradient of ", "gradient", self.gradient.part()),
        ]
        for slot, flat in self.slots.items():
            flat_params.insert(
                0, (f"{slot} of ", "kept", flat)
            )  # one that differs spoils its parameter: it is named first
        if self.is_mixed:
            flat_params.append(("the working copy of ", "working", self.working.part))
        for split, group in groupby(self.layout.pieces, _axes):
            pieces = list(group)
            axis = self.mesh.without({*split, *self.apart})
            if (kept := self.layout.kept(pieces[0].start, pieces[-1].stop)) is None:
                continue
            for what, role, flat in flat_params:
                yield Copies(flat[kept], axis, role, what, partial(self._element, kept.start))

    def _element(self, start: int, index: int) -> tuple[str, str]:
        at = self.layout.own.start + start + index
        return self.layout.piece_at(at).element(at, self.mesh)

    def initialise(self, seed: int) -> None:
        """Initial values of every parameter."""
        for piece in self.layout.pieces:
            if rows := self.layout.rows(piece):
                kept = self.layout.kept_rows(piece, self.master)
                values = kept if kept.shape == piece.shape else kept.new_empty(piece.shape)
                initialise(values, piece.spec, self.mesh, seed, piece.name)
                kept.copy_(values[rows.start : rows.stop])

    def fill(self, value: Callable[[str, Spec], Tensor]) -> None:
        """Values of every parameter, given as the part of it that its spec says."""
        for piece in self.layout.pieces:
            if rows := self.layout.rows(piece):
                kept = self.layout.kept_rows(piece, self.master)
                kept.copy_(value(piece.name, piece.spec)[rows.start : rows.stop])


def _axes(piece: Piece) -> set[str]:
    """The axes that split a parameter."""
    return {axis for axes in piece.spec.split.values() for axis in axes}
