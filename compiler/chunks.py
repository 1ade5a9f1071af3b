"""What a rank of a pipeline has of each bucket, stage by stage, and when in its row that is moved.

Purpose: the IR gathers and reduces a bucket of all stages at once, at the scope of the step.  A rank does this to the
parameters of each of its stages by themselves, its chunks: it gathers them at the step's start, waits for them before
their stage's first forward, and reduces their gradients behind its last backward.  All of that follows from the
pipeline's value.
Non-goals: how buckets move (`routes`), and what a rank has of the program else (`portions`).
"""

from collections.abc import Iterator

from attrs import frozen

from .ir import Bucket, Pipeline, Program
from .layout import layout, shard_axes
from .schedules.actions import Row
from .stages import has, stages


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


def chunks(program: Program, rank: int) -> list[Chunk]:
    """Those of a rank along the pipeline's axis, by bucket and stages."""
    pipeline = program.pipeline
    assert pipeline, "chunks: no pipeline"
    return [chunk for bucket in program.buckets for chunk in _of_bucket(program, pipeline, bucket, rank)]


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


def _of_bucket(program: Program, pipeline: Pipeline, bucket: Bucket, rank: int) -> Iterator[Chunk]:
    found: dict[tuple[int, ...], list[str]] = {}
    for name in bucket.params:
        for holders in _holders(program, pipeline, name, rank):
            found.setdefault(holders, []).append(name)
    if is_together(pipeline, bucket) and found:
        own = tuple(sorted({stage for holders in found for stage in holders}))
        found = {own: [name for name in bucket.params if any(name in names for names in found.values())]}
    for holders, names in sorted(found.items()):
        yield Chunk(bucket.name, holders, tuple(names), _size(program, pipeline, bucket, holders, tuple(names)))


def _holders(program: Program, pipeline: Pipeline, name: str, rank: int) -> list[tuple[int, ...]]:
    """The stages of a rank that have a parameter together; each by itself has its turns of one that is cut."""
    whole, own = dict(pipeline.held), has(pipeline, rank)
    if name in whole:
        holders = tuple(stage for stage in own if stage in whole[name])
        return [holders] if holders else []
    cut = pipeline.dims.index(next(param.type.dims[0] for param in program.params if param.name == name))
    turns = stages(program, pipeline)
    return [(stage,) for stage in own if turns[stage].turns[cut]]


def _size(
    program: Program, pipeline: Pipeline, bucket: Bucket, holders: tuple[int, ...], names: tuple[str, ...]
) -> int:
    """With the turns of the first of its stages: parameters that are cut are of one alone."""
    turns = stages(program, pipeline)[holders[0]].turns
    sized = program.sized(dict(zip(pipeline.dims, map(len, turns), strict=True)))
    return layout(sized, names, program.degree(shard_axes(program, bucket))).size
