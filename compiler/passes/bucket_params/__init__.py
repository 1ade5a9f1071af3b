"""Joins parameters whose gradients are reduced alike into flat buckets.

Purpose: per bucket one `pack` of gradients, one chain of coercions, one part of the norm, one
`update`.  Where the plan shares out state, gradients are scattered, each rank updates its part, and
the parts are gathered: the parameters' own chains become one of the bucket.  The scope of these ops
is the step, or a layer of a repeat.  Before: `place_state`.  Non-goals: which parameters go
together (`assign`).
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from attrs import evolve

from ...analysis.bucket_layout import layout
from ...ir import (
    Bucket,
    Dim,
    Kind,
    Leave,
    Op,
    Program,
    Region,
    Type,
    Value,
    Yield,
    blocks,
    defs,
    ops_in,
    regions_in,
)
from ...ops.builder import OpBuilder
from .assign import BucketGroup, ParamUse, make_groups, make_groups_as, sharing
from .comms import with_gathers, with_reductions, write_gather, write_reduction, write_shard
from .param_loops import LoopFinder, without


def fuse_buckets(program: Program) -> Program:
    """The program with buckets."""
    return _Fuser(program, partial(make_groups, program)).program()


def fuse_buckets_as(program: Program, buckets: Sequence[Bucket]) -> Program:
    """The program with buckets of the same parameters as `buckets`, which belong to the same plan
    at other sizes.
    """
    return _Fuser(program, partial(make_groups_as, program, buckets)).program()


NORMS = ("grad_norm", "unscaled_norm")
"""The ops that make the norm of all parts' sums of squares."""


class _Fuser:
    def __init__(
        self, program: Program, group: Callable[[Iterable[ParamUse]], list[BucketGroup]]
    ) -> None:
        self._program, self._step = program, program.region
        self._ops = ops_in(self._step.body)
        self._made_by = defs(self._ops)
        self._updates = {op.inputs[3]: op for op in self._ops if op.kind == "update"}
        self._microbatches = program.microbatches
        self._loops = LoopFinder(self._microbatches)
        self._groups = group(map(self._get_use, self._updates))
        self._frame = evolve(
            program,
            dims=(*program.dims, *map(self._flat, self._groups)),
            buckets=tuple(map(self._bucket, self._groups)),
        )
        self._builder = OpBuilder(self._frame, free=self._sums())

    def program(self) -> Program:
        gone, builder = self._gone(), self._builder
        body = without(self._step, gone).body
        first = next(i for i, stmt in enumerate(body) if isinstance(stmt, Region))
        (microbatches,) = regions_in(body)
        gathers = builder.inner()
        parts = dict[str, str]()
        # as forward uses them
        for group in reversed(self._groups):
            if group.shards:
                parts[group.name] = self._write_gathers(group, gathers)
        microbatches, totals = self._per_layer(microbatches, parts)
        final = self._final(totals)
        following = ops_in(body[first:])
        norm = next(i for i, op in enumerate(following) if op.kind in NORMS)
        total = self._norm(following[norm], list(final.values()))
        updates = [self._update(group, final[group.name]) for group in self._groups]
        # biases come last
        changes = sorted([*following[norm + 1 :], *updates], key=lambda op: op.kind == "balanced")
        # gathers are last of all that comes before forward: who waits for a count does not wait for
        # them
        ahead = (*body[:first], *gathers.body, microbatches)
        ops = (*ahead, *following[:norm], *builder.body, total, *changes)
        buckets = list[Bucket]()
        for bucket in self._frame.buckets:
            buckets.append(evolve(bucket, type=builder.types[final[bucket.name]]))
        return evolve(self._frame, region=evolve(self._step, body=ops), buckets=tuple(buckets))

    def _final(self, totals: dict[str, str]) -> dict[str, str]:
        """The gradient of record of each bucket: what its layers reduce, or else what the step
        writes.
        """
        final = dict[str, str]()
        for group in self._groups:
            gradients = [param.summed for param in group.params]
            final[group.name] = totals.get(group.name) or write_reduction(
                group, gradients, self._builder
            )
        return final

    # ---- what there is

    def _get_use(self, param: str) -> ParamUse:
        leaf, summed = self._leaf(param)[-1], self._chain(self._updates[param].inputs[0])[0]
        results = zip(self._microbatches.yields, self._microbatches.results, strict=True)
        end, value = next((end, value) for end, value in results if value.name == summed)
        return ParamUse(param, leaf, summed, value.type, self._loops.loops(leaf, end.name))

    def _chain(self, name: str) -> list[str]:
        """The names from the microbatches' sum to the gradient that is updated with."""
        chain = [name]
        while op := self._made_by.get(chain[0]):
            chain.insert(0, op.inputs[0])
        return chain

    def _leaf(self, param: str) -> list[str]:
        """The names from a parameter to what the model uses."""
        after = {op.inputs[0]: op for op in self._ops if op.kind in ("cast", "coerce")}
        chain = [param]
        while op := after.get(chain[-1]):
            chain.append(op.outputs[0].name)
        return chain

    def _sums(self) -> set[str]:
        """The parts of the norm."""
        sums = {op.outputs[0].name for op in self._ops if op.kind == "sum_squares"}
        squares = frozenset(sums)
        for op in self._ops:
            if op.kind == "coerce" and op.inputs[0] in squares:
                sums.add(op.outputs[0].name)
        return sums

    def _gone(self) -> set[str]:
        """The ops that the buckets' own ops replace."""
        gone = self._sums()
        for update in self._updates.values():
            gone |= {value.name for value in update.outputs}
            gone |= {*self._chain(update.inputs[0])[1:]}
        for group in self._groups:
            for param in group.params:
                if group.shards:
                    gone |= {*self._leaf(param.name)[1:]}
                if param.loops and group.reshard_after_forward:
                    gone |= {*param.loops.slices}
                if param.loops and group.shard_gradients:
                    gone |= {param.summed, *param.loops.sums}
        return gone

    def _bucket(self, group: BucketGroup) -> Bucket:
        """The bucket, whose gradient of record is not placed yet; stages free what they gather
        where parameters are sharded."""
        staged = bool(
            self._program.pipeline
            and group.shards
            and self._program.state_of(group.names[0]).parameters
        )
        return Bucket(
            group.name,
            group.names,
            Type(group.key.dtype, (*group.layers, group.dim)),
            group.shards,
            group.reduce_axes,
            group.reshard_after_forward or staged,
            group.shard_gradients,
        )

    def _flat(self, group: BucketGroup) -> Dim:
        degree = self._program.degree
        size = layout(self._program, group.names, degree(group.shards), len(group.layers)).size
        return Dim(group.dim, size * degree(group.key.shard_axes), span=self._step.span)

    # ---- what is written

    def _write_gathers(self, group: BucketGroup, builder: OpBuilder) -> str:
        """Writes the step's ops on a shared bucket's parameters; returns each rank's part of
        them for the model.
        """
        leaves = [self._made_by[param.leaf].outputs[0] for param in group.params]
        part = write_shard(group, leaves, builder)
        if not group.reshard_after_forward:
            write_gather(group, part, leaves, builder)
        return part

    def _per_layer(self, region: Region, parts: dict[str, str]) -> tuple[Region, dict[str, str]]:
        """The microbatches with what layers do, and the sums of the gradients that they reduce."""
        (forward, backward), builder = blocks(region), self._builder
        yields, results = list[Yield](), list[Value]()
        totals = dict[str, str]()
        for group in self._groups:
            if not group.layers:
                continue
            part = parts[group.name] if group.reshard_after_forward else ""
            if part:
                forward = with_gathers(group, forward, part, builder)
            backward, total = with_reductions(group, backward, part, builder)
            if total:
                summed = builder.value(total, builder.types[total])
                yields.append(Yield(total, Leave.SUM))
                results.append(summed)
                totals[group.name] = summed.name
        region = evolve(
            region,
            body=(forward, backward),
            yields=(*region.yields, *yields),
            results=(*region.results, *results),
        )
        return region, totals

    def _norm(self, op: Op, final: list[str]) -> Op:
        """Writes the sums of squares, added over the axes on which gradients are sharded;
        returns their norm's op.
        """
        builder = self._builder
        names_alike = dict[object, list[str]]()
        for group, name in zip(self._groups, final, strict=True):
            alike = (
                builder.types[name].axes_in(Kind.SHARDED),
                sharing(self._program, group.names[0]),
            )
            names_alike.setdefault(alike, []).append(name)
        inputs = list[str]()
        if op.kind == "unscaled_norm":
            # the loss scale comes first
            inputs.append(op.inputs[0])
        for names in names_alike.values():
            squares = builder.write("sum_squares", names, "grad_norm_sq")
            inputs.append(builder.reduce(squares))
        return evolve(op, inputs=tuple(inputs))

    def _update(self, group: BucketGroup, final: str) -> Op:
        """One update of all parameters of a bucket."""
        first = self._updates[group.names[0]]
        outputs = tuple(self._updates[param].outputs[0] for param in group.names)
        inputs = (final, *first.inputs[1:3], *group.names)
        return Op("update", inputs, outputs, (("bucket", group.name),), span=first.span)
