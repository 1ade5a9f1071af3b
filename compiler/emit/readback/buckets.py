"""The moves of flat buckets, read off the IR: in the step, and around each layer of a repeat.

Purpose: the lines of a layer act on all its buckets at once, in the order of the buckets; the IR
must do the same.  Backward undoes lines in the opposite order.  Non-goals: the lines
(`forward`, `step`), and whether a bucket's moves are right (the verifier).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby

from attrs import evolve, frozen

from ...analysis.param_uses import leaves
from ...ir import Bucket, Enter, Kind, Op, Program, Region, Value, walk
from ...ir.placements import ends
from ..loop_hooks import repeat_of

Repeats = tuple[tuple[str, str], ...]
"""The dims of repeats around a body, itself included, and their lines of the plan: the same in
forward and backward.
"""


class LayerMoves:
    """One layer of a repeat of forward, which is in `repeats`; slices of the parameters `entering`
    enter it.

    It has a flat parameter of each bucket in `own`.  A bucket in `inner` has one flat parameter for
    each layer of the repeats in this one.
    """

    def __init__(
        self, program: Program, region: Region, repeats: Repeats, entering: Collection[str]
    ) -> None:
        self._program, self._region = program, region
        self._of = {bucket.dim: bucket.name for bucket in program.buckets}
        sliced_dims = set[str]()
        for arg in region.args:
            if arg.enter is Enter.EACH:
                sliced_dims |= {*arg.value.type.dims}
        self.own_buckets, self.inner = list[str](), list[str]()
        for bucket in program.buckets:
            if bucket.dim in sliced_dims or {*entering} & {*bucket.params}:
                if len(bucket.layers) == len(repeats):
                    self.own_buckets.append(bucket.name)
                elif len(bucket.layers) > len(repeats):
                    self.inner.append(bucket.name)
        self._forward = _ops(region)
        self._backward = self._backward_at(repeats) if self.own_buckets else list[Op]()

    def functions(self) -> tuple[list[str], list[str]]:
        """The functions that are called before a layer, and after it."""
        if not self.own_buckets:
            return [], []
        buckets = [self._program.bucket(name) for name in self.own_buckets]
        resharded = [bucket.name for bucket in buckets if bucket.reshard_after_forward]
        assert _complete(self._backward) == self.own_buckets, (
            f"emit: {', '.join(self.own_buckets)} are reduced in another order"
        )
        for ops in (self._forward, self._backward):
            gathers = self._gathers(ops)
            assert gathers == resharded[::-1], (
                f"emit: {', '.join(gathers)} are not gathered in the order of buckets"
            )
        is_gathered = any(bucket.shard_axes for bucket in buckets)
        before = "unshard" if is_gathered else "reduce_grads_in_backward"
        return [before], ["reshard"] if resharded else []

    def groups(self, names: Collection[str], paths: Mapping[str, str]) -> list[str]:
        """The repeats whose layers have the buckets of these names; `paths` are parameters'
        name patterns.
        """
        firsts = (self._program.bucket(name).params[0] for name in names)
        return [*dict.fromkeys(repeat_of(paths[first]) for first in firsts)]

    def flat(self) -> list[Op]:
        """The ops that the moves do in forward."""
        return [op for op in self._forward if op.kind == "unpack" or self._bucket_of_coercion(op)]

    def without_moves(self) -> Region:
        """The repeat without these ops."""
        flat = self.flat()
        body = [stmt for stmt in self._region.body if stmt not in flat]
        return evolve(self._region, body=tuple(body))

    def _backward_at(self, around: Repeats) -> list[Op]:
        """The ops of the repeat of backward that undoes this one: the gradients of its buckets are
        complete there.
        """
        candidates = list[list[Op]]()
        for repeats, ops in _repeats(self._program.backward):
            if repeats == around and {*_complete(ops)} == {*self.own_buckets}:
                candidates.append(ops)
        assert len(candidates) == 1, (
            f"emit: backward has {len(candidates)} repeats that complete"
            f" {', '.join(self.own_buckets)}"
        )
        return candidates[0]

    def _bucket_of_coercion(self, op: Op) -> str:
        """The bucket whose flat buffer an op leads from one placement to another; "" if it does
        not.
        """
        dims = op.outputs[0].type.dims if op.kind == "coerce" else ()
        return self._of.get("".join(dims[-1:]), "")

    def _gathers(self, ops: Sequence[Op]) -> list[str]:
        """The buckets that are gathered, in their order."""
        buckets = list[str]()
        for op in ops:
            bucket = self._bucket_of_coercion(op)
            if bucket and ends(op)[0].kind is Kind.SHARDED:
                buckets.append(bucket)
        return buckets


def _complete(ops: Sequence[Op]) -> list[str]:
    """The buckets whose gradients are complete in a layer of backward, in their order."""
    return [str(op.get("bucket")) for op in ops if op.kind in ("begin", "pack")]


def _repeats(region: Region, around: Repeats = ()) -> Iterator[tuple[Repeats, list[Op]]]:
    """The repeats in a region.

    Each has the dims and plan lines of the repeats around it, itself included, and its own ops.
    """
    for inner in region.body:
        if isinstance(inner, Region):
            repeats = (*around, (inner.dim, str(inner.span)))
            yield repeats, _ops(inner)
            yield from _repeats(inner, repeats)


def _ops(region: Region) -> list[Op]:
    return [stmt for stmt in region.body if isinstance(stmt, Op)]


# ---- in the step


@frozen(slots=False)
class Buckets:
    """The buckets of a program; `paths` are the parameters' names in the model's state."""

    program: Program
    paths: Mapping[str, str]

    @cached_property
    def leaves(self) -> dict[str, str]:
        """The values that are parameters as the model uses them."""
        return leaves(self.program)

    @cached_property
    def _types(self) -> dict[str, str]:
        return {name: "".join(type.dims[-1:]) for name, type in self.program.types.items()}

    @cached_property
    def _coercions(self) -> list[Op]:
        """The coercions of flat buffers in the step."""
        ops = (op for op in self.program.region.body if isinstance(op, Op) and op.kind == "coerce")
        return [op for op in ops if self.bucket_of(op.outputs[0])]

    def bucket_of(self, value: Value) -> Bucket | None:
        """The bucket whose flat buffer a value is, if it is one."""
        return self.of_name(value.name)

    def of_name(self, name: str) -> Bucket | None:
        """The same by name."""
        for bucket in self.program.buckets:
            if bucket.dim == self._types[name]:
                return bucket
        return None

    def moves(self, bucket: Bucket) -> bool:
        """Whether layers or chunks of a bucket are moved by themselves."""
        return bucket.per_layer or self.program.pipeline is not None

    def has_chunks(self, bucket: Bucket) -> bool:
        """Whether a bucket may have several chunks: what several ranks have is one."""
        pipeline = self.program.pipeline
        return pipeline is not None and len(pipeline.ranks_of(bucket.params[0])) < 2

    def run_of(self, bucket: Bucket) -> list[str]:
        """The chunks, or layers' groups, that the step begins to gather in one line, if this bucket
        is their first.

        Chunks go by their buckets' names, layers by their repeats'.
        """
        run = next((run for run in self._runs() if run[0] == bucket), list[Bucket]())
        if self.program.pipeline:
            return [member.name for member in run]
        repeats = [*dict.fromkeys(map(self._repeat_of, run))]
        alike = list[Bucket]()  # the buckets that layers do not gather themselves
        for other in reversed(self.program.buckets):
            is_ahead = other.per_layer and not other.reshard_after_forward
            if is_ahead and other.shard_axes == bucket.shard_axes:
                alike.append(other)
        gathered = list[Bucket]()
        for repeat in repeats:
            gathered += [other for other in alike if self._repeat_of(other) == repeat]
        assert gathered == run, (
            f"emit: with {bucket.name} the step gathers other buckets than the IR"
        )
        return repeats

    def _repeat_of(self, bucket: Bucket) -> str:
        return repeat_of(self.paths[bucket.params[0]])

    def _runs(self) -> Iterator[list[Bucket]]:
        """Buckets whose gathers follow each other, of the same layers and axes."""
        gathers = list[tuple[Bucket, tuple[str, ...]]]()
        for op in self._coercions:
            bucket = self.bucket_of(op.outputs[0])
            if bucket and ends(op)[0].kind is Kind.SHARDED:
                gathers.append((bucket, op.names("axes")))
        for _, run in groupby(gathers, key=lambda gather: (gather[0].layers, gather[1])):
            buckets = [bucket for bucket, _ in run]
            if self.moves(buckets[0]):
                yield buckets

    def are_moved(self) -> bool:
        """Whether a step asks for the buffers of layers or chunks."""
        return self.have_chunks or any(bucket.per_layer for bucket in self.program.buckets)

    @property
    def have_chunks(self) -> bool:
        """Whether anything of a pipeline's chunks is gathered or reduced."""
        moved = any(bucket.shard_axes or bucket.reduce_axes for bucket in self.program.buckets)
        return self.program.pipeline is not None and moved

    def reduces(self, bucket: Bucket, op: Op) -> bool:
        """Whether backward, or a stage, has begun a reduction: it does so for all buckets that
        move, except sums over stages.
        """
        return self.moves(bucket) and op in self._sums(bucket)

    def _sums(self, bucket: Bucket) -> list[Op]:
        stages = self.program.pipeline.axis if self.program.pipeline else ""
        sums = list[Op]()
        for op in self._coercions:
            is_sum = ends(op)[0].kind is Kind.PARTIAL and stages not in op.names("axes")
            if is_sum and self.bucket_of(op.outputs[0]) == bucket:
                sums.append(op)
        return sums

    def sums(self, bucket: Bucket) -> tuple[str, ...]:
        """The sums over microbatches of the gradients of a bucket's parameters."""
        reduced = set[str]()  # in backward itself, so that no sums of them leave it
        for op in walk(self.program.backward.body):
            if op.kind == "pack":
                reduced |= {*self.program.bucket(str(op.get("bucket"))).params}
        params = [param.name for param in self.program.params if param.name not in reduced]
        results = self.program.microbatches.results[self.program.microbatch_results :]
        sum_of = {param: value.name for param, value in zip(params, results, strict=False)}
        return tuple(sum_of[param] for param in bucket.params)
