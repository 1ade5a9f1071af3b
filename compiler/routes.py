"""How the flat buffers of buckets move in a step: over which axes, and at which scope.

Purpose: what emission, accounts and orders ask of a bucket, read off the ops on its flat dim in one place.
Non-goals: choosing it (`passes.fuse_buckets`), and checking what was emitted (`emit.readback` reads the ops).
"""

from collections.abc import Iterator

from attrs import frozen

from .ir import Bucket, Kind, Op, Program, Region
from .placements import ends

Axes = tuple[str, ...]


@frozen
class Route:
    """A bucket's collectives.

    gather   the axes over which ranks' parts of its parameters are gathered; () where all ranks keep all
    scatter  the axes over which its gradient is reduced and scattered at once
    add      the axes over which what is left is reduced
    sent     the element type of what is sent then
    keeps_weights    whether parameters stay gathered for the step, rather than for one turn at a time
    keeps_gradients  whether gradients add up over microbatches before they are reduced, once in a step
    """

    bucket: Bucket
    gather: Axes
    scatter: Axes
    add: Axes
    sent: str
    keeps_weights: bool
    keeps_gradients: bool


def routes(program: Program) -> dict[str, Route]:
    """The route of each bucket, by name."""
    found: dict[str, list[tuple[Op, bool]]] = {bucket.dim: [] for bucket in program.buckets}
    for op, is_step in _placed(program.region, True):
        flat = op.outputs[0].type.dims[-1:] if op.kind == "coerce" else ()
        if flat and flat[0] in found:
            found[flat[0]].append((op, is_step))
    return {bucket.name: _route(bucket, found[bucket.dim]) for bucket in program.buckets}


def _route(bucket: Bucket, ops: list[tuple[Op, bool]]) -> Route:
    gathers = [(op, is_step) for op, is_step in ops if ends(op)[0].kind is Kind.SHARDED]
    scatters = [op for op, _ in ops if (ends(op)[0].kind, ends(op)[1].kind) == (Kind.PARTIAL, Kind.SHARDED)]
    adds = [op for op, _ in ops if (ends(op)[0].kind, ends(op)[1].kind) == (Kind.PARTIAL, Kind.INVARIANT)]
    return Route(
        bucket,
        gather=gathers[0][0].names("axes") if gathers else (),
        scatter=scatters[0].names("axes") if scatters else (),
        add=adds[0].names("axes") if adds else (),
        sent=next((op.outputs[0].type.dtype for op in (*scatters, *adds)), bucket.type.dtype),
        keeps_weights=all(is_step for _, is_step in gathers),
        keeps_gradients=all(is_step for op, is_step in ops if op in scatters or op in adds),
    )


def _placed(region: Region, is_step: bool) -> Iterator[tuple[Op, bool]]:
    """Every op, and whether it stands at the scope of the step."""
    for stmt in region.body:
        if isinstance(stmt, Region):
            yield from _placed(stmt, False)
        else:
            yield stmt, is_step
