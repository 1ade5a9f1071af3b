"""Buckets: what one says of itself against the ops that gather and reduce it, and the reductions
that layers begin.

Non-goals: the types and operands of these ops (`ops`).
"""

from collections.abc import Iterable
from itertools import chain

from attrs import evolve, frozen

from ...ir import Bucket, Kind, Leave, Op, Program, ops_in, regions_in, walk, walk_regions
from ...ir.placements import ends
from ..param_uses import products
from .checker import Checker


class Buckets(Checker):
    """The buckets of a program whose ops are right."""

    def check(self) -> None:
        """Layers begin what the step packs, ops move buckets as these say, and one product's
        weights are adjacent.
        """
        if self.program.region.kind == "step":
            self._check_begins()
        self._check_moves()
        if self.program.buckets:
            self._check_products()

    def _check_begins(self) -> None:
        """Each `begin` begins what its bucket's `pack` waits for, and is alone in it."""
        params = {param.name for param in self.program.params}
        waiting: dict[object, tuple[str, ...]] = {}
        for op in ops_in(self.program.region.body):
            if op.kind == "pack" and op.inputs[0] not in params:
                waiting[op.get("bucket")] = op.inputs
        origins, seen = _Origins.of(self.program), set[object]()
        for region in walk_regions([self.program.region]):
            ends = {end.name for end in region.yields}
            for op in ops_in(region.body):
                if op.kind != "begin":
                    continue
                name = op.get("bucket")
                layers = len(self.program.bucket(str(name)).layers)
                complete = tuple(origins.layer(packed, layers) for packed in waiting.get(name, ()))
                fits = {*op.inputs} <= ends and complete == op.inputs and name not in seen
                assert fits, f"begin of {name} is not of what the step packs"
                seen.add(name)

    def _check_moves(self) -> None:
        """Checks that ops move each bucket as it says, sums over a pipeline's stages apart."""
        program = self.program
        moves = self._moves()
        for bucket in program.buckets:
            ops = moves[bucket.dim]
            actual, dtype = _make_moved_bucket(program, bucket, ops), program.reduce_dtype(bucket)
            assert actual == bucket, (
                f"bucket {bucket.name} is moved as one with {_facts(actual)}, not {_facts(bucket)}"
            )
            sent = set[str]()
            for op, _ in ops:
                if ends(op)[0].kind is Kind.PARTIAL:
                    sent.add(op.outputs[0].type.dtype)
            assert sent <= {dtype}, (
                f"bucket {bucket.name} is reduced in {', '.join(sorted(sent))}, not {dtype}"
            )

    def _moves(self) -> dict[str, list[tuple[Op, bool]]]:
        """By the flat dim of a bucket, the ops that move it, each with whether it is at the scope
        of the step.
        """
        program, body = self.program, self.program.region.body
        moves: dict[str, list[tuple[Op, bool]]] = {bucket.dim: [] for bucket in program.buckets}
        stages = program.pipeline.axis if program.pipeline else ""
        step_ops = [(op, True) for op in ops_in(body)]
        inner_ops = [(op, False) for op in walk(regions_in(body))]
        for op, is_step in step_ops + inner_ops:
            if op.kind != "coerce" or stages in op.names("axes"):
                continue
            dims = op.outputs[0].type.dims
            if dims and dims[-1] in moves:
                moves[dims[-1]].append((op, is_step))
        return moves

    def _check_products(self) -> None:
        """The weights of one product lie side by side in a bucket."""
        for names in products(self.program):
            (bucket,) = (bucket for bucket in self.program.buckets if names[0] in bucket.params)
            place = bucket.params.index(names[0])
            side_by_side = bucket.params[place : place + len(names)]
            assert side_by_side == names, (
                f"{', '.join(names)} of one product lie as {', '.join(side_by_side)}"
            )


def _make_moved_bucket(program: Program, bucket: Bucket, ops: list[tuple[Op, bool]]) -> Bucket:
    """The bucket with the facts of these ops, each with whether it is at the scope of the step."""
    staged = program.pipeline is not None and bool(program.state_of(bucket.params[0]).parameters)
    sharding, reducing = list[Op](), list[Op]()
    reshards = shards_gradients = False
    for op, is_step in ops:
        source, target = ends(op)
        if Kind.SHARDED in (source.kind, target.kind):
            sharding.append(op)
        if source.kind is Kind.SHARDED:
            reshards = reshards or staged or not is_step
        if source.kind is Kind.PARTIAL:
            shards_gradients = shards_gradients or not is_step
            if target.kind is Kind.INVARIANT:
                reducing.append(op)
    return evolve(
        bucket,
        shard_axes=_axes(sharding),
        reduce_axes=_axes(reducing),
        reshard_after_forward=reshards,
        shard_gradients=shards_gradients,
    )


def _axes(ops: Iterable[Op]) -> tuple[str, ...]:
    """The axes of all these ops.

    Where they are not the same, the different axes one after the other: no bucket has these.
    """
    return tuple(chain.from_iterable(dict.fromkeys(op.names("axes") for op in ops)))


def _facts(bucket: Bucket) -> str:
    return (
        f"shard_axes {[*bucket.shard_axes]}, reduce_axes {[*bucket.reduce_axes]}, "
        f"reshard_after_forward {bucket.reshard_after_forward}, shard_gradients"
        f" {bucket.shard_gradients}"
    )


@frozen
class _Origins:
    """Where values come from: results of regions from what their layers yield, casts from their
    operands.
    """

    ends: dict[str, tuple[Leave, str]]
    casts: dict[str, str]

    @classmethod
    def of(cls, program: Program) -> "_Origins":
        ends: dict[str, tuple[Leave, str]] = {}
        for region in walk_regions([program.region]):
            for end, result in zip(region.yields, region.results, strict=False):
                ends[result.name] = end.leave, end.name
        casts = {op.outputs[0].name: op.inputs[0] for op in program.ops if op.kind == "cast"}
        return cls(ends, casts)

    def layer(self, name: str, layers: int) -> str:
        """The value that a layer yields into a stack of `layers` repeats that microbatches sum;
        "" of anything else.
        """
        for leave in (Leave.SUM, *[Leave.STACK] * layers):
            while leave is Leave.STACK and name in self.casts:
                name = self.casts[name]
            way_out, name = self.ends.get(name, (None, ""))
            if way_out is not leave:
                return ""
        return name
