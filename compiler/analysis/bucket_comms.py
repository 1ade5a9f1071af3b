"""How the flat buffers of buckets move in a step: over which axes, and at which scope.

Purpose: what emission, accounts and orders ask of a bucket, read off the ops on its flat dim in one place.
Non-goals: choosing it (`passes.fuse_buckets`), and checking what was emitted (`emit.readback` reads the ops).
"""

from collections.abc import Iterator

from attrs import frozen

from ..ir import Bucket, Kind, Op, Program, Region
from ..ir.placements import ends

Axes = tuple[str, ...]


@frozen
class Route:
    """A bucket's collectives.

    gather   the axes over which ranks' parts of its parameters are gathered; () where all ranks keep all
    scatter  the axes over which its gradient is reduced and scattered at once
    add      the axes over which what is left is reduced
    sent     the element type of what is sent then
    reshard_after_forward  whether parameters are gathered for one layer, or to the end of a stage, not for the step
    shard_gradients        whether each microbatch reduces gradients, which otherwise add up and are reduced once a step
    """

    bucket: Bucket
    gather: Axes
    scatter: Axes
    add: Axes
    sent: str
    reshard_after_forward: bool
    shard_gradients: bool


def routes(program: Program) -> dict[str, Route]:
    """The route of each bucket, by name; sums over the stages of a pipeline are no part of it."""
    stages = program.pipeline.axis if program.pipeline else ""
    found: dict[str, list[tuple[Op, bool]]] = {bucket.dim: [] for bucket in program.buckets}
    for op, is_step in _placed(program.region, True):
        flat = op.outputs[0].type.dims[-1:] if op.kind == "coerce" and stages not in op.names("axes") else ()
        if flat and flat[0] in found:
            found[flat[0]].append((op, is_step))
    return {bucket.name: _route(program, bucket, found[bucket.dim]) for bucket in program.buckets}


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


def _route(program: Program, bucket: Bucket, ops: list[tuple[Op, bool]]) -> Route:
    gathers = [(op, is_step) for op, is_step in ops if ends(op)[0].kind is Kind.SHARDED]
    scatters = [op for op, _ in ops if (ends(op)[0].kind, ends(op)[1].kind) == (Kind.PARTIAL, Kind.SHARDED)]
    adds = [op for op, _ in ops if (ends(op)[0].kind, ends(op)[1].kind) == (Kind.PARTIAL, Kind.INVARIANT)]
    return Route(
        bucket,
        gather=gathers[0][0].names("axes") if gathers else (),
        scatter=scatters[0].names("axes") if scatters else (),
        add=adds[0].names("axes") if adds else (),
        sent=next((op.outputs[0].type.dtype for op in (*scatters, *adds)), bucket.type.dtype),
        reshard_after_forward=any(not is_step or _frees(program, bucket) for _, is_step in gathers),
        shard_gradients=any(not is_step for op, is_step in ops if op in scatters or op in adds),
    )


def _frees(program: Program, bucket: Bucket) -> bool:
    """Whether stages of a pipeline, which gather once in a step, free their parameters when they end."""
    return program.pipeline is not None and any(program.state_of(name).parameters for name in bucket.params[:1])


def _placed(region: Region, is_step: bool) -> Iterator[tuple[Op, bool]]:
    """Every op, and whether it stands at the scope of the step."""
    for stmt in region.body:
        if isinstance(stmt, Region):
            yield from _placed(stmt, False)
        else:
            yield stmt, is_step
