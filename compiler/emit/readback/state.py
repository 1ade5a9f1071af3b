"""What the state holds at each point of a step: of each bucket, the value that its parameters and its gradient are.

Purpose: takes the ops that `state.weights()`, `state.flat_params(…)`, `unshard_ahead(…)` and `state.gradients()` stand
for. Non-goals: the other statements of a step (`step`), and what turns do with their buffers (`turns`).
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from attrs import Factory, define, frozen

from ...analysis.bucket_layout import shard_axes
from ...ir import REPLICATED, Attr, Bucket, Kind, Op, Program, sharded, walk
from ...ir.placements import ends
from .ast_matching import Ops, demand
from .values import blocks


@frozen
class Sent:
    """The element type in which a collective sends a buffer, and that of the buffer itself."""

    dtype: str
    kept: str


@frozen
class Reduction:
    """How each chunk of a bucket is reduced: over which axes, by keyword, and in which element type, "" for its own."""

    bucket: str
    over: dict[str, tuple[str, ...]]
    sent: str


@define
class TrainState:
    """By bucket, the names of values; gradients are there from `state.gradients()` on."""

    program: Program
    ops: Ops
    weights: dict[str, str] = Factory(dict[str, str])
    flat_params: dict[str, str] = Factory(dict[str, str])  # of buckets of turns: the parameters of all turns
    gradients: dict[str, str] = Factory(dict[str, str])

    def move(self, before: str, after: str) -> None:
        """In place: whatever held the one value holds the other from now on."""
        for held in (self.weights, self.flat_params, self.gradients):
            held.update({name: after for name, value in held.items() if value == before})

    def coerce(self, node: ast.AST, name: str, attrs: Mapping[str, Attr], sent: Sent) -> str:
        """The value after a coercion of `name`, which stands between two casts where it is sent as another type."""
        casts = sent.dtype != sent.kept
        before = self._cast(node, name, sent.dtype) if casts else name
        after = self.ops.first(self.ops.take(node, "coerce", [before], attrs).outputs[0].name)
        return self._cast(node, after, sent.kept) if casts else after

    def _cast(self, node: ast.AST, name: str, dtype: str) -> str:
        return self.ops.first(self.ops.take(node, "cast", [name], {"dtype": dtype}).outputs[0].name)

    # ---- parameters

    def take_weights(self, node: ast.AST) -> None:
        """Of buckets that ranks share out as a whole: what this rank holds of the flat parameters."""
        demand(node, not self.weights, "takes the parameters twice")
        self.weights = self._packed(node, moves=False)

    def take_flats(self, node: ast.AST) -> None:
        """The same of buckets of turns, or of the chunks of a pipeline's."""
        self.flat_params = self._packed(node, moves=True)

    def moves(self, bucket: Bucket) -> bool:
        """Whether turns or chunks of a bucket are moved by themselves."""
        return bool(bucket.turns or self.program.pipeline)

    def has_chunks(self, bucket: Bucket) -> bool:
        """Whether a bucket may have several chunks: what several ranks have is one."""
        pipeline = self.program.pipeline
        return pipeline is not None and len(pipeline.ranks_of(bucket.params[0])) < 2

    def _packed(self, node: ast.AST, moves: bool) -> dict[str, str]:
        shared = [b for b in self.program.buckets if shard_axes(self.program, b) and self.moves(b) == moves]
        packs = {b.name: self.ops.take(node, "pack", b.params, {"bucket": b.name}) for b in shared}
        return {name: self.ops.first(op.outputs[0].name) for name, op in packs.items()}

    def gather(self, node: ast.AST, names: Sequence[str], axes: tuple[str, ...]) -> None:
        """Begins the gathers of all turns or chunks: of those buckets together that the IR gathers one by one."""
        runs = [*self._runs()]
        demand(node, [*names] in runs, f"gathers {', '.join(names)} together, where the IR has {runs}")
        for name in names:
            demand(node, name in self.flat_params, f"gathers `{name}` before the state is taken")
            attrs: dict[str, Attr] = {"axes": axes, "from": sharded(self.program.bucket(name).dim), "to": REPLICATED}
            (gathered,) = self.ops.take(node, "coerce", [self.flat_params[name]], attrs).outputs
            self.flat_params[name] = self.ops.first(gathered.name)

    def _runs(self) -> Iterator[list[str]]:
        """The buckets whose turns or chunks the step gathers, those of the same turns and axes together."""
        of = {bucket.dim: bucket for bucket in self.program.buckets}
        gathers = [op for op in self._coercions() if ends(op)[0].kind is Kind.SHARDED]
        found = [(of[op.outputs[0].type.dims[-1]], op.names("axes")) for op in gathers]
        for (turns, _), run in groupby(found, key=lambda each: (each[0].turns, each[1])):
            if turns or self.program.pipeline:
                yield [bucket.name for bucket, _ in run]

    def _coercions(self) -> list[Op]:
        """Those of the step that flat buffers take part in."""
        flat_params = {bucket.dim for bucket in self.program.buckets}
        ops = [op for op in self.program.region.body if isinstance(op, Op) and op.kind == "coerce"]
        return [op for op in ops if flat_params & {*op.outputs[0].type.dims}]

    # ---- gradients

    def take_gradients(self, node: ast.AST) -> None:
        """The sums over microbatches; where backward began to reduce those of turns, they are reduced by now."""
        demand(node, not self.gradients, "takes the gradients twice")
        region, _, backward = blocks(self.program)
        reduced = {str(op.get("bucket")) for op in walk(backward.body) if op.kind == "pack"}
        gone = {param for name in reduced for param in self.program.bucket(name).params}
        params = [param.name for param in self.program.params if param.name not in gone]
        of = {name: value.name for name, value in zip(params, region.results[1:], strict=False)}
        sums = {value.type.dims[-1]: value.name for value in region.results[1 + len(params) :]}
        for bucket in self.program.buckets:
            if bucket.name in reduced:
                self.gradients[bucket.name] = sums[bucket.dim]
                continue
            op = self.ops.take(node, "pack", [of[name] for name in bucket.params], {"bucket": bucket.name})
            self.gradients[bucket.name] = op.outputs[0].name
            if self.moves(bucket):
                self._reduce(node, bucket)

    def _reduce(self, node: ast.AST, bucket: Bucket) -> None:
        """Takes the reductions of a bucket's turns or chunks, which backward began."""
        for op in self._sums(bucket):
            sent = Sent(op.outputs[0].type.dtype, bucket.type.dtype)
            self.gradients[bucket.name] = self.coerce(node, self.gradients[bucket.name], dict(op.attrs), sent)

    def _sums(self, bucket: Bucket) -> list[Op]:
        """The step's reductions of a bucket, but for sums over stages."""
        stages = self.program.pipeline.axis if self.program.pipeline else ""
        sums = [op for op in self._coercions() if ends(op)[0].kind is Kind.PARTIAL and stages not in op.names("axes")]
        return [op for op in sums if op.outputs[0].type.dims[-1] == bucket.dim]

    def reductions(self) -> list[Reduction]:
        """What a pipeline must be told of how chunks are reduced, bucket by bucket."""
        return [self._reduction(bucket) for bucket in self.program.buckets if self._sums(bucket)]

    def _reduction(self, bucket: Bucket) -> Reduction:
        sums = self._sums(bucket)
        over = [("scatter" if ends(op)[1].kind is Kind.SHARDED else "add", op.names("axes")) for op in sums]
        assert len(dict(over)) == len(over), f"emit: {bucket.name} is reduced more than once"
        (sent,) = {op.outputs[0].type.dtype for op in sums}
        return Reduction(bucket.name, dict(over), "" if sent == bucket.type.dtype else sent)
