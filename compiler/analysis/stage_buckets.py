"""What a rank of a pipeline has of each bucket, stage by stage, and when in its row that is moved.

Purpose: the IR gathers and reduces a bucket of all stages at once, at the scope of the step.  A rank does this to the
parameters of each of its stages by themselves, its chunks: it gathers them at the step's start, waits for them before
their stage's first forward, and reduces their gradients behind its last backward.  All of that follows from the
pipeline's value.
Non-goals: what a rank has of the program else (`portions`).
"""

from collections.abc import Iterator

from attrs import frozen

from ..ir import Bucket, Op, Pipeline, Program
from ..ir.stages import has, stages
from ..schedules.actions import Row
from .bucket_layout import layout


@frozen
class Chunk:
    """The parameters of a bucket that these stages of a rank have, and no other of its stages.

    Parameters that several ranks have are one chunk on each.  `size` is that of its flat buffer on a rank that has it
    whole, in elements.
    """

    bucket: str
    stages: tuple[int, ...]
    params: tuple[str, ...]
    size: int


@frozen
class Needed:
    """Where in a row a chunk is needed: from before the cell `begin` to before the cell `end`."""

    begin: int
    end: int


def chunk_moves(program: Program) -> list[Op]:
    """The coercions of flat buffers that a rank of a pipeline does to each of its chunks; none without a pipeline.

    Sums over stages are not among them, which come behind the rows.
    """
    pipeline, flat_params = program.pipeline, {bucket.dim for bucket in program.buckets}
    if not pipeline:
        return []
    coercions = (stmt for stmt in program.region.body if isinstance(stmt, Op) and stmt.kind == "coerce")
    moved = (op for op in coercions if flat_params & {*op.outputs[0].type.dims})
    return [op for op in moved if pipeline.axis not in op.names("axes")]


def chunks(program: Program, rank: int) -> list[Chunk]:
    """Those of a rank along the pipeline's axis, by bucket and stages."""
    pipeline = program.pipeline
    assert pipeline, "chunks: no pipeline"
    own = _Rank(program, pipeline, rank)
    return [chunk for bucket in program.buckets for chunk in own.of_bucket(bucket)]


def needed(row: Row, chunk: Chunk) -> Needed:
    """Where the stages of a chunk begin, and where all have ended: before the action that is computed next.

    What a last action leaves is sent before what its stage's end begins.
    """
    computing = [at for at, action in enumerate(row) if not action.work.is_message]
    own = [i for i, at in enumerate(computing) if row[at].stage in chunk.stages]
    return Needed(computing[own[0]], [*computing, len(row)][own[-1] + 1])


def is_together(pipeline: Pipeline, bucket: Bucket) -> bool:
    """Whether several ranks have a bucket's parameters, all of them as one chunk."""
    return len(pipeline.ranks_of(bucket.params[0])) > 1


class _Rank:
    """What a rank has."""

    def __init__(self, program: Program, pipeline: Pipeline, rank: int) -> None:
        self._program, self._pipeline, self._own = program, pipeline, has(pipeline, rank)
        self._layers = [stage.layers for stage in stages(program, pipeline)]
        self._whole = dict(pipeline.held)
        self._cut = {param.name: param.type.dims[:1] for param in program.params}

    def of_bucket(self, bucket: Bucket) -> Iterator[Chunk]:
        """The chunks of a bucket."""
        found: dict[tuple[int, ...], list[str]] = {}
        for name in bucket.params:
            for holders in self._holders(name):
                found.setdefault(holders, []).append(name)
        if is_together(self._pipeline, bucket) and found:
            own = tuple(sorted({stage for holders in found for stage in holders}))
            found = {own: [name for name in bucket.params if any(name in names for names in found.values())]}
        for holders, names in sorted(found.items()):
            yield Chunk(bucket.name, holders, tuple(names), self._size(bucket, holders, tuple(names)))

    def _holders(self, name: str) -> list[tuple[int, ...]]:
        """The stages that have a parameter together; each by itself has its layers of one that is cut."""
        if name in self._whole:
            holders = tuple(stage for stage in self._own if stage in self._whole[name])
            return [holders] if holders else []
        (dim,) = self._cut[name]
        cut = self._pipeline.dims.index(dim)
        return [(stage,) for stage in self._own if self._layers[stage][cut]]

    def _size(self, bucket: Bucket, holders: tuple[int, ...], names: tuple[str, ...]) -> int:
        """With the layers of the first of its stages: parameters that are cut are of one alone."""
        layers = map(len, self._layers[holders[0]])
        sized = self._program.sized(dict(zip(self._pipeline.dims, layers, strict=True)))
        return layout(sized, names, self._program.degree(bucket.shard_axes)).size
