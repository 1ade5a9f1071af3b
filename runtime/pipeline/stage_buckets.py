"""Weights and gradients of pipeline stages: weights are gathered before a stage's first forward, gradients are reduced
after its last backward, while the rank's other stages work.

A rank has a `FlatParam` of a bucket for each of its stages, the stage's chunk; parameters that several of its stages
share are one chunk of all these.  Chunks are gathered in the order in which stages begin (`unshard_ahead`), which on
every rank is that of their numbers.  A stage ends before the next action that computes, after its sends have begun.

Non-goals: when stages work (`executor`); parameters that several ranks share, which the step sums explicitly.
"""

from ..state.flat_param import FlatParam
from ..state.flat_param_group import FlatParams, in_order


class Chunks:
    """The chunks of one pass, which reduces gradients if it `trains`: stages `begin` and `end`, each once."""

    def __init__(self, flat_params: FlatParams, trains: bool = False) -> None:
        self._flats = [own for each in flat_params.values() for own in in_order(each) if own.place]
        self._reduced = (
            [own for own in self._flats if own.bucket.shard_axes or own.bucket.reduce_axes] if trains else []
        )
        watch = self._flats[0].mesh.watch if self._flats else None
        self._line = watch.here() if watch is not None else None
        self._ended: set[int] = set()

    def begin(self, stage: int) -> None:
        """Waits for the weights of a stage."""
        for own in self._flats:
            if stage in own.place:
                own.wait_for_unshard()

    def end(self, stage: int) -> None:
        """Begins to reduce the gradients, and frees the weights, of chunks whose last stage this was."""
        self._ended.add(stage)
        for own in self._reduced:
            if self._is_last(stage, own):
                own.begin_reduction(self._line)
        for own in self._flats:
            if self._is_last(stage, own):
                own.reshard()

    def _is_last(self, stage: int, own: FlatParam) -> bool:
        return stage in own.place and self._ended.issuperset(own.place)
