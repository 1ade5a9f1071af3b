"""The memory of buckets.

The buffers of all layers of a repeat lie in one tensor per kind, layer after layer: a step zeroes,
scales and updates all layers at once, while each one's weights are gathered, and its gradients
reduced, by themselves (`flat_param_group`).  A chunk of a pipeline has memory of its own, and moves
likewise (`pipeline.stage_step`).

Non-goals: which parameters a bucket has (`buckets`), no communication.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..comm.mesh import Copies, Mesh
from .buckets import (
    Bucket,
    Claims,
    Holders,
    LayerIndex,
    by_stages,
    claim_parameters,
    products,
    split_by,
)
from .flat_param import Buffers, FlatParam
from .grad_reduction import Accumulate, Reductions
from .layout import Layout
from .optimizers import Part
from .parameters import Spec


@dataclass(frozen=True)
class Elements:
    """Properties of each element: the types of the model's and of master weights, and an
    optimizer's slots.

    accumulate  how gradients of the one type are added to sums of the other
    """

    dtype: torch.dtype
    master: torch.dtype
    slots: tuple[str, ...]
    accumulate: Accumulate


class Memory:
    """A bucket's memory: a `FlatParam` for each layer, in the layers' `shape`, or a single one.

    In a pipeline it is the memory of one chunk, of `stages`.
    """

    def __init__(
        self,
        bucket: Bucket,
        layers: Mapping[LayerIndex, Claims],
        products: Sequence[tuple[str, ...]],
        mesh: Mesh,
        elements: Elements,
        stages: tuple[int, ...],
        reductions: Reductions,
    ) -> None:
        self.bucket, self._mesh, self._shape, self._stages = bucket, mesh, _shape([*layers]), stages
        self._products, self.reductions = products, reductions
        axis = mesh.axis(*bucket.shard_axes)
        layouts = [Layout(claims, mesh, axis) for claims in layers.values()]
        assert len({*map(_outline, layouts)}) == 1, "bucket: layers differ"
        self._layout = layout = layouts[0]

        def zeros(length: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*self._shape, length, dtype=dtype, device=mesh.device)

        dtype, master = elements.dtype, elements.master
        self._whole: Tensor | None = None
        if bucket.reshard_after_forward and axis.size > 1:
            self._part = zeros(layout.part, dtype)
        else:
            self._whole = zeros(layout.size, dtype)
            self._part = self._whole[..., layout.own]
        self._master = self._part
        if dtype != master:
            self._master = zeros(layout.part, master)
        self._gradient = zeros(layout.part if bucket.shard_gradients else layout.size, master)
        self._slots = {slot: zeros(layout.part, master) for slot in elements.slots}
        self._accumulate = elements.accumulate
        self.flat_params = list[FlatParam]()
        indices = product(*map(range, self._shape))
        for index, layer_layout in zip(indices, layouts, strict=True):
            self.flat_params.append(self._flat(index, layer_layout))
        for one, next_ in pairwise(self.flat_params):
            one.after, next_.before = next_, one

    def _flat(self, index: tuple[int, ...], layout: Layout) -> FlatParam:
        """One layer's memory."""
        whole = self._part.new_empty(layout.size) if self._whole is None else self._whole[index]
        slots = {slot: flat[index] for slot, flat in self._slots.items()}
        buffers = Buffers(
            whole, self._part[index], self._gradient[index], self._master[index], slots
        )
        return FlatParam(
            index or self._stages,
            layout,
            self._mesh,
            self.bucket,
            buffers,
            self.reductions,
            self._accumulate,
            self._products,
        )

    @property
    def is_chunk(self) -> bool:
        """Whether its bucket may have others, of other stages."""
        return bool(self.bucket.stages) and not self.bucket.among

    def nest_by_repeat(self, values: Sequence[Any]) -> list[Any]:
        """The values of each layer as a program iterates over them: lists in lists, the
        outermost repeat outside.
        """
        nested = [*values]
        for size in reversed(self._shape[1:]):
            nested = [nested[i : i + size] for i in range(0, len(nested), size)]
        return nested

    def gradient(self) -> Tensor:
        """The gradient of record, [layers, …]: this rank's part; the whole where the step
        itself reduces it.
        """
        if self.bucket.moves:
            return self._own_gradient()
        return self._gradient

    def _own_gradient(self) -> Tensor:
        """This rank's part of the gradient of record."""
        if self.bucket.shard_gradients:
            return self._gradient
        return self._gradient[..., self._layout.own]

    def copies(self) -> Iterator[Copies]:
        """The copies that ranks have in common: within a stage, and between stages that share
        parameters.
        """
        among = self.bucket.among and self._mesh.among(self.bucket.stages, *self.bucket.among)
        for flat in self.flat_params:
            for copies in flat.copies():
                yield copies
                if among:
                    yield replace(copies, axis=among)

    def zero(self) -> None:
        """Zeroes the gradients."""
        self._gradient.zero_()

    def parts(self) -> Iterator[Part]:
        """The optimizer's view: each group's part of all layers, as far as this rank keeps it."""
        for group, span in self._layout.groups:
            if kept := self._layout.overlap_with_own(span.start, span.stop):
                parameters = _of_layers(self._master, kept)
                gradients = _of_layers(self._own_gradient(), kept)
                slots = {slot: _of_layers(flat, kept) for slot, flat in self._slots.items()}
                working: Tensor | None = None
                if self._part is not self._master:
                    working = _of_layers(self._part, kept)
                yield Part(group, parameters, gradients, slots, working)

    def refresh(self) -> None:
        """Brings this rank's part of the working weights up to date with the masters."""
        if self._part is not self._master:
            self._part.copy_(self._master)


def _outline(layout: Layout) -> tuple[int, ...]:
    """The size of a layout, and where its pieces begin."""
    return layout.size, *(piece.start for piece in layout.pieces)


def _of_layers(flat: Tensor, kept: slice) -> Tensor:
    """A stretch of every layer, [layers, elements]: a view."""
    return flat.view(-1, flat.shape[-1])[:, kept]


def memories(
    specs: Mapping[str, Spec],
    buckets: Mapping[str, Bucket],
    holders: Holders,
    mesh: Mesh,
    elements: Elements,
) -> dict[str, list[Memory]]:
    """Each bucket's memory by its name; in a pipeline, the memory of each of its chunks.  Asserts
    that every parameter is in a bucket.
    """
    unclaimed, memories_by_bucket = dict(specs), dict[str, list[Memory]]()
    for name, bucket in buckets.items():
        claims = claim_parameters(bucket.groups, unclaimed, partial=bool(bucket.stages))
        reductions = Reductions(mesh.device)
        chunks: dict[tuple[int, ...], Claims] = {(): claims}
        if bucket.stages:
            chunks = by_stages(claims, holders, together=bool(bucket.among))
        for stages, chunk_claims in chunks.items():
            layers: dict[LayerIndex, Claims] = {(): chunk_claims}
            if bucket.per_layer:
                layers = split_by(chunk_claims, lambda claim: claim.layer)
            memory = Memory(
                bucket, layers, products(chunk_claims), mesh, elements, stages, reductions
            )
            memories_by_bucket.setdefault(name, []).append(memory)
    assert not unclaimed, f"state: in no bucket: {', '.join(unclaimed)}"
    return memories_by_bucket


def _shape(layers: list[LayerIndex]) -> tuple[int, ...]:
    """How many layers each repeat has, outermost first."""
    sizes = list[int]()
    for level in range(len(layers[0])):
        sizes.append(len({layer[level] for layer in layers}))
    shape = tuple(sizes)
    assert len(layers) == prod(shape), f"bucket: repeats of {shape} layers have {len(layers)}"
    return shape
