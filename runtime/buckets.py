"""Flat buffers: the parameters of one bucket side by side, with their gradients and optimizer state.

Parameters and gradients are views, so that one collective reduces, and one kernel updates, a whole bucket.

Non-goals: no choice of what goes together (the plan's), no communication (the program's).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import prod
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


class Bucket:
    """One placement's parameters.

    `master` is what the optimizer updates and `gradient` what it reads; `working` is what the model computes with,
    a copy in another dtype, or `master` itself.
    """

    def __init__(
        self,
        groups: list[tuple[Group, dict[str, Spec]]],
        mesh: Mesh,
        dtype: torch.dtype,
        master: torch.dtype,
        slots: tuple[str, ...],
    ) -> None:
        self.mesh = mesh
        self.groups: list[tuple[Group, slice]] = []
        self.pieces: list[Piece] = []
        size = 0
        for group, specs in groups:
            pieces = _lay_out(specs, mesh, size)
            self.pieces += pieces
            self.groups.append((group, slice(size, pieces[-1].stop)))
            size = pieces[-1].stop
        self.master = torch.zeros(size, dtype=master, device=mesh.device)
        self.gradient = torch.zeros_like(self.master)
        self.working = self.master if dtype == master else torch.zeros(size, dtype=dtype, device=mesh.device)
        self.slots = {slot: torch.zeros_like(self.master) for slot in slots}

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters, by name: views of `working`, whose gradients arrive in `gradient`."""
        for piece in self.pieces:
            parameter = nn.Parameter(piece.view(self.working))
            gradient = piece.view(self.gradient)
            if self.working is self.master:
                parameter.grad = gradient  # autograd accumulates in place
            else:
                cast(Any, parameter).register_post_accumulate_grad_hook(_accumulate_into(gradient))
            yield piece.name, parameter

    def parts(self) -> Iterator[Part]:
        """The optimizer's view: each group's slices of the flat buffers."""
        for group, span in self.groups:
            yield Part(
                group, self.master[span], self.gradient[span], {slot: flat[span] for slot, flat in self.slots.items()}
            )

    def record(self) -> Iterator[tuple[str, Spec, Tensor]]:
        """What a checkpoint holds: (key, spec, this rank's part) of every parameter and slot."""
        for piece in self.pieces:
            yield piece.name, piece.spec, piece.view(self.master)
            for slot, flat in self.slots.items():
                yield f"optimizer/{slot}/{piece.name}", piece.spec, piece.view(flat)

    def copies(self) -> Iterator[Copies]:
        """Everything in its memory, in stretches that the same ranks hold alike."""
        flats: list[tuple[str, Role, Tensor]] = [
            ("", "kept", self.master),
            ("the gradient of ", "gradient", self.gradient),
        ]
        for slot, flat in self.slots.items():
            flats.insert(0, (f"{slot} of ", "kept", flat))  # one that differs spoils its parameter: it is named first
        if self.working is not self.master:
            flats.append(("the working copy of ", "working", self.working))
        for split, group in groupby(self.pieces, lambda piece: {a for axes in piece.spec.split.values() for a in axes}):
            pieces = list(group)
            axis, span = self.mesh.without(split), slice(pieces[0].start, pieces[-1].stop)
            for what, role, flat in flats:
                yield Copies(flat[span], axis, role, what, partial(self._element, span.start))

    def _element(self, start: int, index: int) -> tuple[str, str]:
        piece = next(piece for piece in self.pieces if piece.start <= start + index < piece.stop)
        return piece.element(start + index, self.mesh)

    def initialise(self, seed: int) -> None:
        """Initial values of every parameter."""
        for piece in self.pieces:
            initialise(piece.view(self.master), piece.spec, self.mesh, seed, piece.name)
        self.refresh()

    def refresh(self) -> None:
        """Brings `working` up to date with `master`."""
        if self.working is not self.master:
            self.working.copy_(self.master)


def _lay_out(specs: dict[str, Spec], mesh: Mesh, start: int) -> list[Piece]:
    """The parameters one after another, from `start` on."""
    pieces: list[Piece] = []
    for name, spec in specs.items():
        pieces.append(Piece(name, spec, spec.local_shape(mesh), start))
        start = pieces[-1].stop
    return pieces


def _accumulate_into(total: Tensor) -> Callable[[Tensor], None]:
    """A hook that adds a parameter's gradient to `total`, which is wider, and frees it."""

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None, "state: a post-accumulate hook without a gradient"
        total.add_(parameter.grad)
        parameter.grad = None

    return hook
