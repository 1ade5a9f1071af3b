"""What moves around the stages of a pipeline: each one's weights are there from its first forward on, its gradients are
reduced behind its last backward, while the rank's other stages work.

Of a bucket a rank has a `FlatParam` for each of its stages, its chunk; parameters that several of its stages have are a
chunk of these.  Chunks are gathered in the order in which stages begin (`unshard_ahead`), which on every rank is that
of their numbers.  A stage ends before the next action that computes: what it sends to others is on its way first.

Non-goals: when stages work (`pipeline`); parameters that several ranks have, which the step sums in sight.
"""

from ..state.flat_param import FlatParam
from ..state.flat_param_group import FlatParams, in_order


class Chunks:
    """Those of one pass, which reduces gradients if it `trains`: stages `begin` and `end`, each once."""

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
        """Of chunks of which this was the last stage, begins to reduce the gradients, and frees the weights."""
        self._ended.add(stage)
        for own in self._reduced:
            if self._is_last(stage, own):
                own.begin_reduction(self._line)
        for own in self._flats:
            if self._is_last(stage, own):
                own.reshard()

    def _is_last(self, stage: int, own: FlatParam) -> bool:
        return stage in own.place and self._ended.issuperset(own.place)
