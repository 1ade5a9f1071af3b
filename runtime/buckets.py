"""Buckets: what a program says of parameters that go together, and their memory.

What the turns of a repeat have of a kind lies in one tensor, turn after turn: a step zeroes, scales and updates all
turns at once, while each turn's weights are gathered, and its gradients reduced, by themselves (`flows`).

Non-goals: no choice of what goes together (the plan's), no communication.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise, product
from math import prod
from typing import Any

import torch
from torch import Tensor

from .flat import Flat
from .gradient import Gradient, Reductions
from .layout import Layout, Members
from .mesh import Copies, Mesh
from .optimizers import Group, Part
from .parameters import Spec
from .working import Working

Turn = tuple[str, ...]
"""A turn of nested repeats, outermost first: what stands for the `*` of patterns."""


class Bucket:
    """Groups of parameters of one placement, of which the ranks along the axes `shards` keep a part each.

    With `turns`, each turn of the repeats that the patterns' `*` run over is moved by itself.  A rank that does not
    keep gradients, or weights, keeps only its part of them, and the whole of a turn while it is at work on it; weights
    are gathered `prefetch` turns ahead.

    Each rank along the axis `stages` has the parameters of its own stages alone, which may be none; those that several
    ranks use are held alike by the ranks `among` all.
    """

    def __init__(
        self,
        *groups: Group,
        turns: bool = False,
        shards: tuple[str, ...] = (),
        keeps_gradients: bool = True,
        keeps_weights: bool = True,
        prefetch: int = 1,
        stages: str = "",
        among: tuple[int, ...] = (),
    ) -> None:
        assert turns or (keeps_gradients and keeps_weights), "bucket: only turns are shared out while they are used"
        self.groups, self.turns, self.shards = groups, turns, shards
        self.keeps_gradients, self.keeps_weights, self.prefetch = keeps_gradients, keeps_weights, prefetch
        self.stages, self.among = stages, among


class Memory:
    """A bucket's memory: a `Flat` for each turn, in the turns' `shape`, or a single one; of which each is a part."""

    def __init__(
        self,
        bucket: Bucket,
        turns: Mapping[Turn, Members],
        mesh: Mesh,
        dtype: torch.dtype,
        master: torch.dtype,
        slots: tuple[str, ...],
    ) -> None:
        self.bucket, self._mesh, self._shape = bucket, mesh, _shape([*turns])
        axis = mesh.axis(*bucket.shards)
        layouts = [Layout(members, mesh, axis) for members in turns.values()]
        assert len({(each.size, *(piece.start for piece in each.pieces)) for each in layouts}) == 1, "bucket: odd turns"
        self._layout = layout = layouts[0]

        def zeros(length: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*self._shape, length, dtype=dtype, device=mesh.device)

        self._whole = zeros(layout.size, dtype) if bucket.keeps_weights or axis.size == 1 else None
        self._part = zeros(layout.part, dtype) if self._whole is None else self._whole[..., layout.own]
        self._master = zeros(layout.part, master) if dtype != master else self._part
        self._gradient = zeros(layout.size if bucket.keeps_gradients else layout.part, master)
        self._slots = {slot: zeros(layout.part, master) for slot in slots}
        self.reductions = Reductions(mesh.device)
        indices = product(*map(range, self._shape))
        self.flats = [self._flat(index, each) for index, each in zip(indices, layouts, strict=True)]
        for one, next_ in pairwise(flat.working for flat in self.flats):
            one.after, next_.before = next_, one

    def _flat(self, index: tuple[int, ...], layout: Layout) -> Flat:
        """One turn's memory."""
        whole = self._part.new_empty(layout.size) if self._whole is None else self._whole[index]
        working = Working(whole, self._part[index], self._whole is None, self.bucket.prefetch)
        gradient = Gradient(self._gradient[index], layout, not self.bucket.keeps_gradients, self.reductions)
        slots = {slot: flat[index] for slot, flat in self._slots.items()}
        apart = {*self.bucket.shards, *filter(None, [self.bucket.stages])}
        return Flat(layout, self._mesh, apart, working, gradient, self._master[index], slots)

    def nested(self) -> list[Any]:
        """The flats as a program runs over them: lists in lists, those of the outermost repeat outside."""
        nested: list[Any] = self.flats
        for size in reversed(self._shape[1:]):
            nested = [nested[i : i + size] for i in range(0, len(nested), size)]
        return nested

    def gradient(self) -> Tensor:
        """The gradient of record, [turns, …], of this rank's part; of a bucket without turns, of the whole."""
        return self._gradient if not self.bucket.turns else self._own_gradient()

    def _own_gradient(self) -> Tensor:
        return self._gradient[..., self._layout.own] if self.bucket.keeps_gradients else self._gradient

    def copies(self) -> Iterator[Copies]:
        """What ranks hold alike: those of a stage, and those of stages that share parameters."""
        among = self.bucket.among and self._mesh.among(self.bucket.stages, *self.bucket.among)
        for flat in self.flats:
            for each in flat.copies():
                yield each
                if among:
                    yield replace(each, axis=among)

    def scale(self, scale: Tensor) -> None:
        """Multiplies the gradients that the optimizer reads."""
        self._own_gradient().mul_(scale)

    def zero(self) -> None:
        """Zeroes the gradients."""
        self._gradient.zero_()

    def parts(self) -> Iterator[Part]:
        """The optimizer's view: each group's slices of the flats, as far as this rank keeps them."""
        for group, span in self._layout.groups:
            if kept := self._layout.kept(span.start, span.stop):
                slots = {slot: [flat.slots[slot][kept] for flat in self.flats] for slot in self._slots}
                gradients = [flat.gradient.part()[kept] for flat in self.flats]
                yield Part(group, [flat.master[kept] for flat in self.flats], gradients, slots)

    def refresh(self) -> None:
        """Brings this rank's part of the working weights up to date with the masters."""
        if self._part is not self._master:
            self._part.copy_(self._master)


def members(specs: Mapping[str, Spec], buckets: Mapping[str, Bucket]) -> dict[str, dict[Turn, Members]]:
    """Each bucket's groups with their parameters, by turns; asserts that these share out all parameters."""
    left = dict(specs)
    found: dict[str, dict[Turn, Members]] = {}
    for name, bucket in buckets.items():
        claims = [(group, _claim(group, left, bool(bucket.stages))) for group in bucket.groups]
        found[name] = _by_turns(claims) if bucket.turns else {(): [(g, _specs(claimed)) for g, claimed in claims]}
    assert not left, f"state: in no bucket: {', '.join(left)}"
    return found


@dataclass(frozen=True, slots=True)
class _Claimed:
    """A parameter that a pattern matches, and what the pattern's `*` stand for."""

    name: str
    spec: Spec
    turn: Turn


def _claim(group: Group, left: dict[str, Spec], partial: bool) -> list[_Claimed]:
    """Takes out of `left` what a group's patterns match; asserts that each does, but where a model is `partial`."""
    claimed: list[_Claimed] = []
    for pattern in group.patterns:
        names = [name for name in left if _matches(name, pattern)]
        assert names or partial, f"state: `{pattern}` matches no parameter that is not in a bucket already"
        claimed += [_Claimed(name, left.pop(name), _turn(name, pattern)) for name in names]
    return claimed


def _matches(name: str, pattern: str) -> bool:
    """Whether each dotted part matches: `layers.*.wq` stands for `layers.3.wq` but not for `layers.3.attention.wq`."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _turn(name: str, pattern: str) -> Turn:
    return tuple(part for part, of in zip(name.split("."), pattern.split("."), strict=True) if of == "*")


def _by_turns(claims: list[tuple[Group, list[_Claimed]]]) -> dict[Turn, Members]:
    turns = dict.fromkeys(each.turn for _, claimed in claims for each in claimed)
    return {
        turn: [(group, _specs([each for each in claimed if each.turn == turn])) for group, claimed in claims]
        for turn in turns
    }


def _specs(claimed: list[_Claimed]) -> dict[str, Spec]:
    return {each.name: each.spec for each in claimed}


def _shape(turns: list[Turn]) -> tuple[int, ...]:
    """How many turns each repeat has, outermost first."""
    shape = tuple(len({turn[level] for turn in turns}) for level in range(len(turns[0])))
    assert len(turns) == prod(shape), f"bucket: repeats of {shape} turns have {len(turns)}"
    return shape
