"""The moves of flat buckets, read off the IR: in the step, and around each layer of a repeat.

Purpose: the lines of a layer act on all its buckets at once, in the order of the buckets; so the IR
must do.  Backward does what lines do in the opposite order of the lines.  Non-goals: the lines
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

    It has a flat parameter of each bucket in `own`, and of those in `inner` one for each layer of
    the repeats in it.
    """

    def __init__(
        self, program: Program, region: Region, repeats: Repeats, entering: Collection[str]
    ) -> None:
        self._program, self._region = program, region
        self._of = {bucket.dim: bucket.name for bucket in program.buckets}
        flat_params = {
            dim for arg in region.args if arg.enter is Enter.EACH for dim in arg.value.type.dims
        }
        taken = [b for b in program.buckets if b.dim in flat_params or {*entering} & {*b.params}]
        self.own = [bucket.name for bucket in taken if len(bucket.layers) == len(repeats)]
        self.inner = [bucket.name for bucket in taken if len(bucket.layers) > len(repeats)]
        self._forward, self._backward = _ops(region), self._backward_at(repeats) if self.own else []

    def functions(self) -> tuple[list[str], list[str]]:
        """The functions that are called before a layer, and after it."""
        if not self.own:
            return [], []
        buckets = [self._program.bucket(name) for name in self.own]
        resharded = [bucket.name for bucket in buckets if bucket.reshard_after_forward]
        assert _complete(self._backward) == self.own, (
            f"emit: {', '.join(self.own)} are reduced in another order"
        )
        for ops in (self._forward, self._backward):
            gathers = self._gathers(ops)
            assert gathers == resharded[::-1], (
                f"emit: {', '.join(gathers)} are not gathered in the order of buckets"
            )
        is_gathered = any(bucket.shard_axes for bucket in buckets)
        return ["unshard" if is_gathered else "reduce_grads_in_backward"], [
            "reshard"
        ] if resharded else []

    def groups(self, names: Collection[str], paths: Mapping[str, str]) -> list[str]:
        """The repeats whose layers have the buckets of these names; `paths` are parameters'
        name patterns.
        """
        firsts = (self._program.bucket(name).params[0] for name in names)
        return [*dict.fromkeys(repeat_of(paths[first]) for first in firsts)]

    def flat(self) -> list[Op]:
        """The ops that the moves do in forward."""
        return [op for op in self._forward if op.kind == "unpack" or self._moved(op)]

    def rest(self) -> Region:
        """The repeat without them."""
        flat = self.flat()
        return evolve(
            self._region, body=tuple(stmt for stmt in self._region.body if stmt not in flat)
        )

    def _backward_at(self, around: Repeats) -> list[Op]:
        """The ops of the repeat of backward that undoes this one: where the gradients of its
        buckets are complete.
        """
        found = [ops for repeats, ops in _repeats(self._program.backward) if repeats == around]
        found = [ops for ops in found if {*_complete(ops)} == {*self.own}]
        assert len(found) == 1, (
            f"emit: backward has {len(found)} repeats that complete {', '.join(self.own)}"
        )
        return found[0]

    def _moved(self, op: Op) -> str:
        """The bucket whose flat buffer an op leads from one placement to another; "" if it does
        not.
        """
        dims = op.outputs[0].type.dims if op.kind == "coerce" else ()
        return self._of.get("".join(dims[-1:]), "")

    def _gathers(self, ops: Sequence[Op]) -> list[str]:
        """The buckets that are gathered, in their order."""
        return [
            self._moved(op) for op in ops if self._moved(op) and ends(op)[0].kind is Kind.SHARDED
        ]


def _complete(ops: Sequence[Op]) -> list[str]:
    """The buckets whose gradients are complete in a layer of backward, in their order."""
    return [str(op.get("bucket")) for op in ops if op.kind in ("begin", "pack")]


def _repeats(region: Region, around: Repeats = ()) -> Iterator[tuple[Repeats, list[Op]]]:
    """The repeats in a region: the dims and plan lines of those around each, itself included,
    and its own ops.
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
        return [op for op in ops if self.of(op.outputs[0])]

    def of(self, value: Value) -> Bucket | None:
        """The bucket whose flat buffer a value is, if it is one."""
        return self.of_name(value.name)

    def of_name(self, name: str) -> Bucket | None:
        """The same by name."""
        return next(
            (bucket for bucket in self.program.buckets if bucket.dim == self._types[name]), None
        )

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
            return [each.name for each in run]
        repeats = [*dict.fromkeys(self._repeat_of(each) for each in run)]
        kept = [
            b for b in reversed(self.program.buckets) if b.per_layer and not b.reshard_after_forward
        ]
        alike = [b for b in kept if b.shard_axes == bucket.shard_axes]
        gathered = [b for repeat in repeats for b in alike if self._repeat_of(b) == repeat]
        assert gathered == run, (
            f"emit: with {bucket.name} the step gathers other buckets than the IR"
        )
        return repeats

    def _repeat_of(self, bucket: Bucket) -> str:
        return repeat_of(self.paths[bucket.params[0]])

    def _runs(self) -> Iterator[list[Bucket]]:
        """Buckets whose gathers follow each other, of the same layers and axes."""
        gathers = [op for op in self._coercions if ends(op)[0].kind is Kind.SHARDED]
        found = [(bucket, op.names("axes")) for op in gathers if (bucket := self.of(op.outputs[0]))]
        for _, run in groupby(found, key=lambda each: (each[0].layers, each[1])):
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
        """Whether backward, or a stage, has begun a reduction: of what moves, but for sums over
        stages.
        """
        return self.moves(bucket) and op in self._sums(bucket)

    def _sums(self, bucket: Bucket) -> list[Op]:
        stages = self.program.pipeline.axis if self.program.pipeline else ""
        sums = [
            op
            for op in self._coercions
            if ends(op)[0].kind is Kind.PARTIAL and stages not in op.names("axes")
        ]
        return [op for op in sums if self.of(op.outputs[0]) == bucket]

    def sums(self, bucket: Bucket) -> tuple[str, ...]:
        """The sums over microbatches of the gradients of a bucket's parameters."""
        reduced = {
            str(op.get("bucket")) for op in walk(self.program.backward.body) if op.kind == "pack"
        }
        gone = {param for name in reduced for param in self.program.bucket(name).params}
        params = [param.name for param in self.program.params if param.name not in gone]
        of = {
            name: value.name
            for name, value in zip(
                params, self.program.microbatches.results[self.program.made :], strict=False
            )
        }
        return tuple(of[name] for name in bucket.params)
