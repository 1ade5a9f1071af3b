"""Forward and backward of one stage for one microbatch, the tensors saved in between, and the
stage's buckets.

Weights are gathered before a stage's first forward, gradients are reduced after its last backward,
while the rank's other stages work.  A rank has a `FlatParam` of a bucket for each of its stages,
the stage's chunk; parameters that several of its stages share are one chunk of all these.  Chunks
are gathered in the order in which stages begin (`unshard_ahead`), which on every rank is that of
their numbers.  A stage ends before the next action that computes, after its sends have begun.

Non-goals: in which order stages work (`executor`), values of other ranks (`comm.p2p`), parameters
that several ranks share, which the step sums explicitly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..comm.mesh import Watch
from ..comm.p2p import Slot, StageInput, Values
from ..ops.delayed_wgrad import Part, set_apart
from ..state.flat_param import FlatParam
from ..state.flat_param_group import FlatParams, in_order

_backward: Callable[..., None] = cast(Any, torch.autograd).backward


class Chunks:
    """The chunks of one pass, which reduces gradients if it `trains`: stages `begin` and `end`,
    each once.
    """

    def __init__(self, flat_params: FlatParams, trains: bool = False) -> None:
        self._flats = [own for each in flat_params.values() for own in in_order(each) if own.place]
        self._reduced = (
            [own for own in self._flats if own.bucket.shard_axes or own.bucket.reduce_axes]
            if trains
            else []
        )
        watch = self._flats[0].mesh.watch if self._flats else None
        self._line = watch.here() if watch is not None else None
        self._ended: set[int] = set()

    def begin(self, stage: int) -> None:
        """Waits for the weights of a stage."""
        for flat_param in self._flats:
            if stage in flat_param.place:
                flat_param.wait_for_unshard()

    def end(self, stage: int) -> None:
        """Begins to reduce the gradients, and frees the weights, of chunks whose last stage
        this was.
        """
        self._ended.add(stage)
        for flat_param in self._reduced:
            if self._is_last(stage, flat_param):
                flat_param.begin_reduction(self._line)
        for flat_param in self._flats:
            if self._is_last(stage, flat_param):
                flat_param.reshard()

    def _is_last(self, stage: int, flat_param: FlatParam) -> bool:
        return stage in flat_param.place and self._ended.issuperset(flat_param.place)


@dataclass(eq=False, slots=True)
class Pass:
    """State that a step's actions share: `shares` are the losses' gradients, `sums` those of losses
    and of loads.

    `chunks` are the buckets.
    """

    model: nn.Module
    inputs: Sequence[tuple[Any, ...]]
    shares: Values
    sums: Values
    chunks: Chunks


class Cell:
    """A stage of a microbatch.  x enters it and y leaves it, as dy does and dx, their gradients, in
    backward.

    From forward to backward it keeps x and the graph.  y it keeps only as far as its own graph
    does, so that the memory is free when it is sent or the next stage has done with it.
    """

    def __init__(
        self,
        stage: int,
        microbatch: int,
        enters: Sequence[StageInput],
        leaves: Sequence[StageInput],
        watch: Watch | None,
        x: Slot,
        y: Slot,
        dy: Slot,
        dx: Slot,
    ) -> None:
        self._stage, self._microbatch, self._watch = stage, microbatch, watch
        self._x, self._y, self._dy, self._dx = x, y, dy, dx
        self._enters, self._leaves = enters, leaves
        self._entered: Values = ()
        self._graph: Sequence[GradientEdge] = ()
        self._parts: list[Part] = []

    def forward(self, now: Pass) -> None:
        """F."""
        xs = self._x.take()
        for x, stage_input in zip(xs, self._enters, strict=True):
            x.requires_grad_(stage_input.gradient)
        x = xs if len(xs) > 1 else xs[0] if xs else None
        if self._watch is not None:
            self._watch.microbatch(self._microbatch)
        y: Tensor | Values = now.model(self._stage, x, *now.inputs[self._microbatch])
        ys = (y,) if isinstance(y, Tensor) else y
        if torch.is_grad_enabled():
            self._entered, self._graph = xs, self._edges(now, ys)
        self._leave(now, ys)

    def _edges(self, now: Pass, ys: Values) -> Sequence[GradientEdge]:
        return [
            get_gradient_edge(y)
            for y, stage_input in zip(ys, self._leaves, strict=True)
            if stage_input.gradient
        ]

    def _leave(self, now: Pass, ys: Values) -> None:
        self._y.put(tuple(y.detach() for y in ys))

    def backward(self, now: Pass) -> None:
        """B."""
        graph, self._graph = self._graph, ()
        _backward(graph, self._gradients(now))
        entered, self._entered = self._entered, ()
        # Zeros where a stage does not use what all stages are given.
        self._dx.put(
            tuple(
                torch.zeros_like(x) if x.grad is None else x.grad
                for x in entered
                if x.requires_grad
            )
        )

    def _gradients(self, now: Pass) -> Values:
        return self._dy.take()

    def input_part(self, now: Pass) -> None:
        """I."""
        with set_apart(self._parts):
            self.backward(now)

    def weight_part(self, now: Pass) -> None:
        """W."""
        while self._parts:
            self._parts.pop()()


class LastCell(Cell):
    """A cell of the last stage, whose outputs are parts of the losses, and loads."""

    def _edges(self, now: Pass, ys: Values) -> Sequence[GradientEdge]:
        return [get_gradient_edge(y) for y, _ in zip(ys, now.shares, strict=False)]

    def _leave(self, now: Pass, ys: Values) -> None:
        for total, y in zip(now.sums, ys, strict=False):  # evaluation takes the first
            total += y.detach()

    def _gradients(self, now: Pass) -> Values:
        return now.shares
