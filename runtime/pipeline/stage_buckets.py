"""What moves around the stages of a pipeline: each one's weights are there from its first forward on, its gradients are
reduced behind its last backward, while the rank's other stages work.

Of a bucket a rank has a `FlatParam` for each of its stages, its chunk; parameters that several of its stages have are a
chunk of these.  Chunks are gathered in the order in which stages begin (`unshard_ahead`), which on every rank is that
of their numbers.  A stage ends before the next action that computes: what it sends to others is on its way first.

Non-goals: when stages work (`pipeline`); parameters that several ranks have, which the step sums in sight.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..comm.mesh import Axis
from ..state.flat_param import FlatParam
from ..state.loop_hooks import FlatParams, in_order, line_of


@dataclass(frozen=True, eq=False, slots=True)
class Reduction:
    """How the gradients of chunks are reduced."""

    flat_params: Sequence[FlatParam]
    scatter: Axis | None
    add: Axis | None
    dtype: torch.dtype | None
    line: object

    def begin(self, own: FlatParam) -> None:
        """Begins to sum the gradient of one of them."""
        own.gradient.reductions.begin(own.gradient, self.scatter, self.add, self.dtype, self.line)


def stage_grad_reduction(
    flat_params: Sequence[FlatParam],
    *,
    scatter: Axis | None = None,
    add: Axis | None = None,
    dtype: torch.dtype | None = None,
) -> Reduction:
    """Behind its stages each of these sums its gradient: for each rank of `scatter` its part, and then that over `add`.

    With `dtype`, what is sent and summed is the gradient as that.
    """
    return Reduction(flat_params, scatter, add, dtype, line_of(add or scatter))


class Chunks:
    """Those of one pass: stages `begin` and `end`, each once."""

    def __init__(self, flat_params: FlatParams, reductions: Sequence[Reduction] = ()) -> None:
        self._flats = [own for each in flat_params.values() for own in in_order(each) if own.place]
        self._ends = [(own, each) for each in reductions for own in each.flat_params if own.place]
        self._ended: set[int] = set()

    def begin(self, stage: int) -> None:
        """Waits for the weights of a stage."""
        for own in self._flats:
            if stage in own.place:
                own.working.arrive()

    def end(self, stage: int) -> None:
        """Of chunks of which this was the last stage, begins to reduce the gradients, and frees the weights."""
        self._ended.add(stage)
        for own, reduction in self._ends:
            if self._is_last(stage, own):
                reduction.begin(own)
        for own in self._flats:
            if self._is_last(stage, own):
                own.working.free()

    def _is_last(self, stage: int, own: FlatParam) -> bool:
        return stage in own.place and self._ended.issuperset(own.place)
