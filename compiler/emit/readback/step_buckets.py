"""How the buckets of a step move, read off the IR: whole, layer by layer, or in the chunks of a pipeline's stages.

Non-goals: the lines that move them (`step`, `bucket_moves`).
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import groupby

from attrs import frozen

from ...analysis.param_uses import leaves
from ...ir import Bucket, Kind, Op, Program, Value, blocks, types, walk
from ...ir.placements import ends
from ..loop_hooks import repeat_of


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
        return {name: "".join(type.dims[-1:]) for name, type in types(self.program).items()}

    @cached_property
    def _coercions(self) -> list[Op]:
        """Those of the step that flat buffers take part in."""
        ops = (op for op in self.program.region.body if isinstance(op, Op) and op.kind == "coerce")
        return [op for op in ops if self.of(op.outputs[0])]

    def of(self, value: Value) -> Bucket | None:
        """The bucket of which a value is a flat buffer, if it is one."""
        return self.of_name(value.name)

    def of_name(self, name: str) -> Bucket | None:
        """The same by name."""
        return next((bucket for bucket in self.program.buckets if bucket.dim == self._types[name]), None)

    def moves(self, bucket: Bucket) -> bool:
        """Whether layers or chunks of a bucket are moved by themselves."""
        return bucket.per_layer or self.program.pipeline is not None

    def has_chunks(self, bucket: Bucket) -> bool:
        """Whether a bucket may have several chunks: what several ranks have is one."""
        pipeline = self.program.pipeline
        return pipeline is not None and len(pipeline.ranks_of(bucket.params[0])) < 2

    def run_of(self, bucket: Bucket) -> list[str]:
        """What the step begins to gather in one line, of which this bucket is the first: chunks, or layers' groups.

        Chunks go by their buckets' names, layers by their repeats'.
        """
        run = next((run for run in self._runs() if run[0] == bucket), list[Bucket]())
        if self.program.pipeline:
            return [each.name for each in run]
        repeats = [*dict.fromkeys(self._repeat_of(each) for each in run)]
        kept = [b for b in reversed(self.program.buckets) if b.per_layer and not b.reshard_after_forward]
        alike = [b for b in kept if b.shard_axes == bucket.shard_axes]
        gathered = [b for repeat in repeats for b in alike if self._repeat_of(b) == repeat]
        assert gathered == run, f"emit: with {bucket.name} the step gathers other buckets than the IR"
        return repeats

    def _repeat_of(self, bucket: Bucket) -> str:
        return repeat_of(self.paths[bucket.params[0]])

    def _runs(self) -> Iterator[list[Bucket]]:
        """Those that follow each other, of the same layers and axes."""
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
        """Whether backward, or a stage, has begun a reduction: of what moves, but for sums over stages."""
        return self.moves(bucket) and op in self._sums(bucket)

    def _sums(self, bucket: Bucket) -> list[Op]:
        stages = self.program.pipeline.axis if self.program.pipeline else ""
        sums = [op for op in self._coercions if ends(op)[0].kind is Kind.PARTIAL and stages not in op.names("axes")]
        return [op for op in sums if self.of(op.outputs[0]) == bucket]

    def sums(self, bucket: Bucket) -> tuple[str, ...]:
        """The sums over microbatches of the gradients of a bucket's parameters."""
        region, _, backward = blocks(self.program)
        reduced = {str(op.get("bucket")) for op in walk(backward.body) if op.kind == "pack"}
        gone = {param for name in reduced for param in self.program.bucket(name).params}
        params = [param.name for param in self.program.params if param.name not in gone]
        of = {name: value.name for name, value in zip(params, region.results[1:], strict=False)}
        return tuple(of[name] for name in bucket.params)
