"""The sub-program that one rank, or one stage, of a pipeline runs.

Purpose: types and dims of a program say what all stages have together; accounts are of ranks, whose sizes differ.
These programs have a rank's sizes, and need not be legal: what a stage receives is made by no statement of it.
Non-goals: when stages work (`schedules`), what a stage means (`verify.cut`).
"""

from collections.abc import Iterable

from attrs import evolve

from ..ir import Bucket, Pipeline, Program, Region, blocks
from ..ir.stages import has, share, stages
from .stage_buckets import Chunk, chunks


def of_rank(program: Program, rank: int) -> Program:
    """The program with the parameters of the stages of a rank along the pipeline's axis, and its sizes."""
    pipeline = _pipeline(program)
    layers = [sum(map(len, each)) for each in zip(*(_layers(program, k) for k in has(pipeline, rank)), strict=True)]
    sized = program.sized(dict(zip(pipeline.dims, layers, strict=True)))
    held = {p.name for p in sized.params if _holds(sized, pipeline, p.name, rank)}
    buckets = [evolve(b, params=tuple(name for name in b.params if name in held)) for b in program.buckets]
    params = tuple(param for param in program.params if param.name in held)
    return evolve(with_chunks(sized, chunks(program, rank)), params=params, buckets=tuple(buckets))


def with_chunks(program: Program, own: Iterable[Chunk]) -> Program:
    """The program whose flat buffers are these chunks, side by side."""
    sizes = {bucket.name: 0 for bucket in program.buckets}
    for chunk in own:
        sizes[chunk.bucket] += chunk.size
    return program.sized({b.dim: sizes[b.name] * _split(program, b) for b in program.buckets})


def of_stage(program: Program, stage: int) -> Program:
    """The program with what a stage does of a microbatch, and its layers."""
    pipeline = _pipeline(program)

    def own(region: Region) -> Region:
        return evolve(region, body=share(pipeline, stages(program, pipeline)[stage], *blocks(region)))

    body = tuple(own(stmt) if isinstance(stmt, Region) else stmt for stmt in program.region.body)
    layers = dict(zip(pipeline.dims, map(len, _layers(program, stage)), strict=True))
    return evolve(program.sized(layers), region=evolve(program.region, body=body))


def _pipeline(program: Program) -> Pipeline:
    assert program.pipeline, "portions: no pipeline"
    return program.pipeline


def _layers(program: Program, stage: int) -> tuple[range, ...]:
    return stages(program, _pipeline(program))[stage].layers


def _holds(sized: Program, pipeline: Pipeline, param: str, rank: int) -> bool:
    """Whether a rank has any of a parameter."""
    if param in dict(pipeline.held):
        return rank in pipeline.ranks_of(param)
    (type,) = (each.type for each in sized.params if each.name == param)
    return sized.elements(type) > 0


def _split(program: Program, bucket: Bucket) -> int:
    """By how many ranks a bucket's parameters are split themselves, whose parts its flat dim has all."""
    return program.degree(tuple(axis for axis in bucket.type.axes_of(bucket.dim) if axis not in bucket.shard_axes))
