"""The chunks of each bucket on a pipeline rank, stage by stage, and when in its row they are moved.

Purpose: the IR gathers and reduces a bucket of all stages at once, at the scope of the step.  A
rank does this to the parameters of each of its stages by themselves, its chunks: it gathers them at
the step's start, waits for them before their stage's first forward, and reduces their gradients
after its last backward.  All of that follows from the pipeline's value.  Non-goals: the rest of a
rank's program (`stage_program`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache

from attrs import frozen

from ..ir import Bucket, Op, Pipeline, Program, once
from ..ir.stages import stages, stages_of_param
from .bucket_layout import layout

Sizes = Callable[[Bucket, int, tuple[str, ...]], int]
"""Gives the size of a chunk: of parameters of a bucket, on a stage."""


@frozen
class Chunk:
    """The parameters of a bucket that these stages of a rank have, and no other of its stages.

    Parameters that several ranks have are one chunk on each.  `size` is that of its flat buffer on
    a rank that has it whole, in elements.
    """

    bucket: str
    stages: tuple[int, ...]
    params: tuple[str, ...]
    size: int


def chunk_moves(program: Program) -> list[Op]:
    """The coercions of flat buffers that a rank of a pipeline does to each of its chunks; none
    without a pipeline.

    Sums over stages are not among them, which come after the rows.
    """
    pipeline, flat_params = program.pipeline, {bucket.dim for bucket in program.buckets}
    if not pipeline:
        return []
    coercions = (
        stmt for stmt in program.region.body if isinstance(stmt, Op) and stmt.kind == "coerce"
    )
    moved = (op for op in coercions if flat_params & {*op.outputs[0].type.dims})
    return [op for op in moved if pipeline.axis not in op.names("axes")]


@once
def chunks(program: Program) -> tuple[tuple[Chunk, ...], ...]:
    """The chunks of each rank along the pipeline's axis, by bucket and stages."""
    pipeline = program.pipeline
    assert pipeline, "chunks: no pipeline"
    ranks = range(program.axis(pipeline.axis).size)
    size = _sizes(program, pipeline)
    found = (
        (it for bucket in program.buckets for it in _of_bucket(program, bucket, rank, size))
        for rank in ranks
    )
    return tuple(map(tuple, found))


def needed(spans: Mapping[int, range], stages: Iterable[int]) -> range:
    """The cells of a row from where stages of a chunk begin to where all have ended."""
    own = [spans[stage] for stage in stages]
    return range(min(span.start for span in own), max(span.stop for span in own))


def with_chunks(program: Program, own: Iterable[Chunk]) -> Program:
    """The program whose flat buffers are these chunks, side by side."""
    sizes = {bucket.name: 0 for bucket in program.buckets}
    for chunk in own:
        sizes[chunk.bucket] += chunk.size
    return program.sized({b.dim: sizes[b.name] * _split(program, b) for b in program.buckets})


def _split(program: Program, bucket: Bucket) -> int:
    """By how many ranks a bucket's parameters are split themselves, whose parts its flat dim
    has all.
    """
    return program.degree(
        tuple(axis for axis in bucket.type.axes_of(bucket.dim) if axis not in bucket.shard_axes)
    )


def _of_bucket(program: Program, bucket: Bucket, rank: int, size: Sizes) -> Iterator[Chunk]:
    """The chunks of a bucket on a rank; the stages that have a parameter whole have it together."""
    pipeline = program.pipeline
    assert pipeline, "chunks: no pipeline"
    found: dict[tuple[int, ...], list[str]] = {}
    for param in map(program.param, bucket.params):
        own = [
            stage
            for stage in stages_of_param(program, pipeline, param)
            if pipeline.stage_to_rank[stage] == rank
        ]
        for together in (
            [own] if param.name in dict(pipeline.param_stages) else [[stage] for stage in own]
        ):
            if together:
                found.setdefault(tuple(together), []).append(param.name)
    if len(pipeline.ranks_of(bucket.params[0])) > 1 and found:  # the same on each of them
        own = tuple(sorted({stage for own in found for stage in own}))
        found = {
            own: [name for name in bucket.params if any(name in names for names in found.values())]
        }
    for own, names in sorted(found.items()):
        yield Chunk(bucket.name, own, tuple(names), size(bucket, own[0], tuple(names)))


def _sizes(program: Program, pipeline: Pipeline) -> Sizes:
    """The sizes of chunks, equal ones made once; of parameters that are cut, a chunk has the
    layers of one stage.
    """
    all_ = stages(program, pipeline)

    @cache
    def laid_out(shards: int, layers: tuple[int, ...], params: tuple[str, ...]) -> int:
        return layout(
            program.sized(dict(zip(pipeline.dims, layers, strict=True))), params, shards
        ).size

    def size(bucket: Bucket, stage: int, params: tuple[str, ...]) -> int:
        return laid_out(
            program.degree(bucket.shard_axes), tuple(map(len, all_[stage].layers)), params
        )

    return size
