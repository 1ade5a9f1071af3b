"""Communication around the stages of a rank during its row: unsharded weights, reduced gradients."""

from collections.abc import Callable, Mapping, Sequence

from attrs import frozen

from ...analysis.param_uses import leaves
from ...analysis.stage_buckets import Chunk, chunks, needed
from ...ir import Op, Program, Region
from ...schedules.actions import Row, spans
from ...schedules.dependencies import Cell


@frozen
class Move:
    """Cells of a chunk of a rank: before them its weights are awaited, its reduction begun, its weights freed.

    None where that does not happen.
    """

    rank: int
    chunk: Chunk
    awaited: int | None
    begun: int | None
    freed: int | None

    def has_weights(self, at: int) -> bool:
        """Whether its weights are there in a cell."""
        return (self.awaited is None or self.awaited <= at) and (self.freed is None or at < self.freed)

    def is_reduced(self, at: int) -> bool:
        """Whether in a cell its reduction is in flight, or done: later additions are lost."""
        return self.begun is not None and self.begun <= at


def moves(program: Program, rows: Sequence[Row]) -> tuple[Move, ...]:
    """Communication of all ranks, as it follows from their rows."""
    found: list[Move] = []
    for rank, own in enumerate(map(spans, rows)):
        for chunk in chunks(program)[rank]:
            bucket, span = program.bucket(chunk.bucket), needed(own, chunk.stages)
            found.append(
                Move(
                    rank,
                    chunk,
                    awaited=span.start if bucket.shard_axes else None,
                    begun=span.stop if bucket.shard_axes or bucket.reduce_axes else None,
                    freed=span.stop if bucket.reshard_after_forward else None,
                )
            )
    return tuple(found)


@frozen
class Names:
    """Names of weights and gradients in the microbatches: the parameter of each value that they read or add up."""

    weights: Mapping[str, str]
    gradients: Mapping[str, str]


def names(program: Program, region: Region) -> Names:
    """The names in the microbatches `region` of a step."""
    packs = [op for op in program.region.body if isinstance(op, Op) and op.kind == "pack"]
    of = {
        name: param
        for op in packs
        for name, param in zip(op.inputs, program.bucket(str(op.get("bucket"))).params, strict=False)
    }
    ends = zip(region.yields, region.results, strict=True)
    gradients = {end.name: of[result.name] for end, result in ends if result.name in of}
    return Names(leaves(program), gradients)


class Moved:
    """Present weights and lost gradients, cell by cell."""

    def __init__(self, moves: Sequence[Move], names: Names) -> None:
        self._moves, self._names = moves, names

    def gone(self, cell: Cell, stage: int) -> set[str]:
        """The weights of a stage that are not there."""
        params = self._params(cell, stage, lambda move: not move.has_weights(cell.at))
        return {name for name, param in self._names.weights.items() if param in params}

    def lost(self, cell: Cell, stage: int) -> set[str]:
        """The gradients to which a stage adds in vain."""
        params = self._params(cell, stage, lambda move: move.is_reduced(cell.at))
        return {name for name, param in self._names.gradients.items() if param in params}

    def _params(self, cell: Cell, stage: int, holds: Callable[[Move], bool]) -> set[str]:
        own = (move for move in self._moves if move.rank == cell.rank and stage in move.chunk.stages)
        return {param for move in own if holds(move) for param in move.chunk.params}
