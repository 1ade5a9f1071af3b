"""Checks what a bucket says of itself against the ops that gather and reduce it.

Non-goals: the types and operands of those ops (`ops`).
"""

from collections.abc import Iterable, Iterator

from attrs import evolve

from ...ir import Bucket, Kind, Op, Program, ops_in, regions_in, walk
from ...ir.placements import ends


def misstated(program: Program) -> Iterator[str]:
    """Words for each bucket whose facts are not those of its ops; sums over stages of a pipeline are no part of it."""
    found: dict[str, list[tuple[Op, bool]]] = {bucket.dim: [] for bucket in program.buckets}
    stages = program.pipeline.axis if program.pipeline else ""
    body = program.region.body
    for op, is_step in (*((op, True) for op in ops_in(body)), *((op, False) for op in walk(regions_in(body)))):
        flat = op.outputs[0].type.dims[-1:] if op.kind == "coerce" and stages not in op.names("axes") else ()
        if flat and flat[0] in found:
            found[flat[0]].append((op, is_step))
    for bucket in program.buckets:
        if (actual := _as_moved(program, bucket, found[bucket.dim])) != bucket:
            yield f"bucket {bucket.name} is moved as one with {_facts(actual)}, not {_facts(bucket)}"
        sent = {op.outputs[0].type.dtype for op, _ in found[bucket.dim] if ends(op)[0].kind is Kind.PARTIAL}
        if not sent <= {program.reduce_dtype(bucket)}:
            yield f"bucket {bucket.name} is reduced in {', '.join(sorted(sent))}, not {program.reduce_dtype(bucket)}"


def _as_moved(program: Program, bucket: Bucket, ops: list[tuple[Op, bool]]) -> Bucket:
    """The bucket with the facts of these ops, each with whether it stands at the scope of the step."""
    gathers = [is_step for op, is_step in ops if ends(op)[0].kind is Kind.SHARDED]
    sums = [(op, is_step) for op, is_step in ops if ends(op)[0].kind is Kind.PARTIAL]
    staged = program.pipeline is not None and bool(program.state_of(bucket.params[0]).parameters)
    return evolve(
        bucket,
        shard_axes=_axes(op for op, _ in ops if Kind.SHARDED in (ends(op)[0].kind, ends(op)[1].kind)),
        reduce_axes=_axes(op for op, _ in sums if ends(op)[1].kind is Kind.INVARIANT),
        reshard_after_forward=any(staged or not is_step for is_step in gathers),
        shard_gradients=any(not is_step for _, is_step in sums),
    )


def _axes(ops: Iterable[Op]) -> tuple[str, ...]:
    """The axes of all of these; where they are not the same, those of each after the other, which no bucket has."""
    return tuple(axis for axes in dict.fromkeys(op.names("axes") for op in ops) for axis in axes)


def _facts(bucket: Bucket) -> str:
    return (
        f"shard_axes {[*bucket.shard_axes]}, reduce_axes {[*bucket.reduce_axes]}, "
        f"reshard_after_forward {bucket.reshard_after_forward}, shard_gradients {bucket.shard_gradients}"
    )
