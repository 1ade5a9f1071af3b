"""The chunks of each bucket on a pipeline rank, stage by stage, and when in its row they are moved.

Purpose: the IR gathers and reduces a bucket of all stages at once, at the scope of the step.  A
rank does this to the parameters of each of its stages by themselves, its chunks: it gathers them at
the step's start, waits for them before their stage's first forward, and reduces their gradients
after its last backward.  All this follows from the pipeline's value.  Non-goals: the rest of a
rank's program (`stage_program`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain

from attrs import frozen

from ..ir import Bucket, Op, Pipeline, Program, once
from ..ir.stages import stages, stages_of_param
from .bucket_layout import layout

Sizes = Callable[[Bucket, int, tuple[str, ...]], int]
"""Gives the size of a chunk: of parameters of a bucket, on a stage."""


@frozen
class Chunk:
    """The parameters of a bucket that these stages of a rank have, and no other of its stages.

    Parameters that several ranks have are one chunk on each.  `size` is the size of its flat buffer
    on a rank that has it whole, in elements.
    """

    bucket: str
    stages: tuple[int, ...]
    params: tuple[str, ...]
    size: int


def chunk_moves(program: Program) -> list[Op]:
    """The coercions of flat buffers that a rank of a pipeline does to each of its chunks; none
    without a pipeline.

    Sums over stages, which come after the rows, are not among them.
    """
    pipeline, flat_dims = program.pipeline, {bucket.dim for bucket in program.buckets}
    if not pipeline:
        return []
    moves = list[Op]()
    for op in program.region.body:
        if not isinstance(op, Op) or op.kind != "coerce":
            continue
        is_flat = not flat_dims.isdisjoint(op.outputs[0].type.dims)
        if is_flat and pipeline.axis not in op.names("axes"):
            moves.append(op)
    return moves


@once
def chunks(program: Program) -> tuple[tuple[Chunk, ...], ...]:
    """The chunks of each rank along the pipeline's axis, by bucket and stages."""
    pipeline = program.pipeline
    assert pipeline, "chunks: no pipeline"
    size = _sizes(program, pipeline)
    chunks_by_rank = list[tuple[Chunk, ...]]()
    for rank in range(program.axis(pipeline.axis).size):
        rank_chunks = list[Chunk]()
        for bucket in program.buckets:
            rank_chunks += _of_bucket(program, bucket, rank, size)
        chunks_by_rank.append(tuple(rank_chunks))
    return tuple(chunks_by_rank)


def needed(spans: Mapping[int, range], stages: Iterable[int]) -> range:
    """The cells of a row from where stages of a chunk begin to where all have ended."""
    stage_spans = [spans[stage] for stage in stages]
    begin = min(span.start for span in stage_spans)
    return range(begin, max(span.stop for span in stage_spans))


def with_chunks(program: Program, chunks: Iterable[Chunk]) -> Program:
    """The program whose flat buffers are these chunks, side by side."""
    sizes = {bucket.name: 0 for bucket in program.buckets}
    for chunk in chunks:
        sizes[chunk.bucket] += chunk.size
    dims: dict[str, int] = {}
    for bucket in program.buckets:
        dims[bucket.dim] = sizes[bucket.name] * _split(program, bucket)
    return program.with_sizes(dims)


def _split(program: Program, bucket: Bucket) -> int:
    """How many ranks split a bucket's parameters themselves; its flat dim has all their parts."""
    axes = bucket.type.axes_of(bucket.dim)
    return program.degree(tuple(axis for axis in axes if axis not in bucket.shard_axes))


def _of_bucket(program: Program, bucket: Bucket, rank: int, size: Sizes) -> Iterator[Chunk]:
    """The chunks of a bucket on a rank; the stages that have a parameter whole have it together."""
    pipeline = program.pipeline
    assert pipeline, "chunks: no pipeline"
    is_shared = len(pipeline.ranks_of(bucket.params[0])) > 1
    names_by_stages: dict[tuple[int, ...], list[str]] = {}
    for param in map(program.param, bucket.params):
        rank_stages = list[int]()
        for stage in stages_of_param(program, pipeline, param):
            if pipeline.stage_to_rank[stage] == rank:
                rank_stages.append(stage)
        if param.name not in dict(pipeline.param_stages):
            for stage in rank_stages:
                names_by_stages.setdefault((stage,), []).append(param.name)
        elif rank_stages:
            names_by_stages.setdefault(tuple(rank_stages), []).append(param.name)
    if is_shared and names_by_stages:  # one chunk, the same on each of the ranks
        all_stages = tuple(sorted({*chain.from_iterable(names_by_stages)}))
        names = {*chain.from_iterable(names_by_stages.values())}
        names_by_stages = {all_stages: [name for name in bucket.params if name in names]}
    for numbers, names in sorted(names_by_stages.items()):
        yield Chunk(bucket.name, numbers, tuple(names), size(bucket, numbers[0], tuple(names)))


def _sizes(program: Program, pipeline: Pipeline) -> Sizes:
    """The sizes of chunks, equal ones made once; of parameters that are cut, a chunk has the
    layers of one stage.
    """
    all_stages = stages(program, pipeline)

    @cache
    def get_layout_size(shards: int, layers: tuple[int, ...], params: tuple[str, ...]) -> int:
        sized = program.with_sizes(dict(zip(pipeline.dims, layers, strict=True)))
        return layout(sized, params, shards).size

    def size(bucket: Bucket, stage: int, params: tuple[str, ...]) -> int:
        layers = tuple(map(len, all_stages[stage].layers))
        return get_layout_size(program.degree(bucket.shard_axes), layers, params)

    return size
