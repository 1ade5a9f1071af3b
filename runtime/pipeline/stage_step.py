"""Forward and backward of one stage for one microbatch, the tensors saved in between, and the
stage's buckets.

Weights are gathered before a stage's first forward, gradients are reduced after its last backward,
while the rank's other stages work.  A rank has a `FlatParam` of a bucket for each of its stages,
the stage's chunk; parameters that several of its stages share are one chunk of all these stages.
Chunks are gathered in the order that stages begin (`unshard_ahead`): by their numbers, on every
rank.  A stage ends before the next action that computes, after its sends have begun.

Non-goals: the order of stages' work (`executor`), values of other ranks (`comm.p2p`), parameters
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
    """The chunks of one pass, which reduces gradients if it `trains`; each stage begins and ends
    once.
    """

    def __init__(self, flat_params: FlatParams, trains: bool = False) -> None:
        self._flats = [flat for flat in in_order(flat_params.values()) if flat.place]
        self._reduced = list[FlatParam]()
        for flat in self._flats:
            if trains and (flat.bucket.shard_axes or flat.bucket.reduce_axes):
                self._reduced.append(flat)
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
    """State that a step's actions share: `shares` are the losses' gradients, `sums` the sums of
    losses and of loads.

    `chunks` are the chunks of the buckets.
    """

    model: nn.Module
    inputs: Sequence[tuple[Any, ...]]
    shares: Values
    sums: Values
    chunks: Chunks


class Cell:
    """A stage of a microbatch.  In forward x enters it and y leaves it; in backward dy, the
    gradient of y, enters it and dx leaves it.

    From forward to backward it keeps x and the graph.  It keeps y only as far as its own graph
    does, so that the memory is free when y is sent or the next stage has done with it.
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
        for value, stage_input in zip(xs, self._enters, strict=True):
            value.requires_grad_(stage_input.gradient)
        x: Tensor | Values | None = None  # nothing enters the first stage
        if len(xs) == 1:
            x = xs[0]
        elif xs:
            x = xs
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
        gradients = list[Tensor]()
        for x in entered:
            if not x.requires_grad:
                continue
            # Zeros where a stage does not use a value that enters all stages.
            gradients.append(torch.zeros_like(x) if x.grad is None else x.grad)
        self._dx.put(tuple(gradients))

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
