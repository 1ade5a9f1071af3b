"""Buckets: what one says of itself against the ops that gather and reduce it, and the reductions
that layers begin.

Non-goals: the types and operands of those ops (`ops`).
"""

from collections.abc import Iterable

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
            self._begun()
        self._moved()
        if self.program.buckets:
            self._products()

    def _begun(self) -> None:
        """Each `begin` begins what its bucket's `pack` waits for, and is alone in it."""
        params = {param.name for param in self.program.params}
        packs = [op for op in ops_in(self.program.region.body) if op.kind == "pack"]
        waiting = {op.get("bucket"): op.inputs for op in packs if op.inputs[0] not in params}
        origins, seen = _Origins.of(self.program), set[object]()
        for region in walk_regions([self.program.region]):
            for op in (op for op in ops_in(region.body) if op.kind == "begin"):
                name = op.get("bucket")
                layers = len(self.program.bucket(str(name)).layers)
                complete = tuple(origins.layer(packed, layers) for packed in waiting.get(name, ()))
                yielded = {*op.inputs} <= {end.name for end in region.yields}
                fits = yielded and complete == op.inputs and name not in seen
                assert fits, f"begin of {name} is not of what the step packs"
                seen.add(name)

    def _moved(self) -> None:
        """Sums over stages of a pipeline are no part of it."""
        program, body = self.program, self.program.region.body
        found: dict[str, list[tuple[Op, bool]]] = {bucket.dim: [] for bucket in program.buckets}
        stages = program.pipeline.axis if program.pipeline else ""
        for op, is_step in (
            *((op, True) for op in ops_in(body)),
            *((op, False) for op in walk(regions_in(body))),
        ):
            flat = (
                op.outputs[0].type.dims[-1:]
                if op.kind == "coerce" and stages not in op.names("axes")
                else ()
            )
            if flat and flat[0] in found:
                found[flat[0]].append((op, is_step))
        for bucket in program.buckets:
            actual, dtype = (
                _as_moved(program, bucket, found[bucket.dim]),
                program.reduce_dtype(bucket),
            )
            assert actual == bucket, (
                f"bucket {bucket.name} is moved as one with {_facts(actual)}, not {_facts(bucket)}"
            )
            sent = {
                op.outputs[0].type.dtype
                for op, _ in found[bucket.dim]
                if ends(op)[0].kind is Kind.PARTIAL
            }
            assert sent <= {dtype}, (
                f"bucket {bucket.name} is reduced in {', '.join(sorted(sent))}, not {dtype}"
            )

    def _products(self) -> None:
        """The weights of one product lie side by side in a bucket."""
        for names in products(self.program):
            (bucket,) = (bucket for bucket in self.program.buckets if names[0] in bucket.params)
            at = bucket.params.index(names[0])
            own = bucket.params[at : at + len(names)]
            assert own == names, f"{', '.join(names)} of one product lie as {', '.join(own)}"


def _as_moved(program: Program, bucket: Bucket, ops: list[tuple[Op, bool]]) -> Bucket:
    """The bucket with the facts of these ops, each with whether it is at the scope of the step."""
    gathers = [is_step for op, is_step in ops if ends(op)[0].kind is Kind.SHARDED]
    sums = [(op, is_step) for op, is_step in ops if ends(op)[0].kind is Kind.PARTIAL]
    staged = program.pipeline is not None and bool(program.state_of(bucket.params[0]).parameters)
    return evolve(
        bucket,
        shard_axes=_axes(
            op for op, _ in ops if Kind.SHARDED in (ends(op)[0].kind, ends(op)[1].kind)
        ),
        reduce_axes=_axes(op for op, _ in sums if ends(op)[1].kind is Kind.INVARIANT),
        reshard_after_forward=any(staged or not is_step for is_step in gathers),
        shard_gradients=any(not is_step for _, is_step in sums),
    )


def _axes(ops: Iterable[Op]) -> tuple[str, ...]:
    """The axes of all of these; where they are not the same, those of each after the other,
    which no bucket has.
    """
    return tuple(axis for axes in dict.fromkeys(op.names("axes") for op in ops) for axis in axes)


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
        ends = {
            result.name: (end.leave, end.name)
            for region in walk_regions([program.region])
            for end, result in zip(region.yields, region.results, strict=False)
        }
        return cls(
            ends, {op.outputs[0].name: op.inputs[0] for op in program.ops if op.kind == "cast"}
        )

    def layer(self, name: str, layers: int) -> str:
        """The value that a layer yields into a stack of `layers` repeats that microbatches sum;
        "" of anything else.
        """
        for leave in (Leave.SUM, *[Leave.STACK] * layers):
            while leave is Leave.STACK and name in self.casts:
                name = self.casts[name]
            found, name = self.ends.get(name, (None, ""))
            if found is not leave:
                return ""
        return name
