"""The ops that gather a bucket's parameters and reduce its gradient, in the step or in each layer
of a repeat.

In a layer it is gathered before forward, and a second time before backward.  After the layer's
backward its gradient is reduced.  Where gradients are accumulated over microbatches first, its
reduction `begin`s in the last microbatch.  Before: the slices of stacks that this replaces are gone
(`param_loops.without`).  Non-goals: which buckets (`assign`).
"""

from collections.abc import Callable, Sequence

from attrs import evolve

from ...ir import (
    INVARIANT,
    PARTIAL,
    PRECISIONS,
    REPLICATED,
    Arg,
    Enter,
    Kind,
    Leave,
    Op,
    Region,
    Stmt,
    Value,
    Yield,
    regions_in,
    sharded,
)
from ...ir.placements import Step
from ...ops.builder import OpBuilder
from .assign import BucketGroup
from .param_loops import Path


def write_shard(group: BucketGroup, leaves: Sequence[Value], builder: OpBuilder) -> str:
    """Writes what leads from a shared bucket's state of record to what each rank keeps of it
    for the model.
    """
    name = builder.write("pack", group.names, f"w_{group.identifier}", bucket=group.name)
    name = builder.coerce(name, Step(group.shards, INVARIANT, sharded(group.dim)))
    return builder.cast(name, leaves[0].type.dtype)


def write_gather(
    group: BucketGroup, name: str, leaves: Sequence[Value], builder: OpBuilder
) -> None:
    """Writes what leads from there to the parameters as the model uses them."""
    name = builder.coerce(name, Step(group.shards, sharded(group.dim), REPLICATED))
    replicated = leaves[0].type.axes_in(Kind.REPLICATED)
    others = tuple(axis for axis in replicated if axis not in group.shards)
    name = builder.coerce(name, Step(others, INVARIANT, REPLICATED))
    builder.append(
        Op("unpack", (name,), tuple(leaves), (("bucket", group.name),), span=builder.span)
    )


def write_reduction(group: BucketGroup, gradients: Sequence[str], builder: OpBuilder) -> str:
    """Writes what leads from gradients to the bucket's gradient of record."""
    name = builder.write("pack", gradients, f"g_{group.identifier}", bucket=group.name)
    name = builder.cast(name, group.key.dtype)
    name = _write_sum(name, Step(group.shards, PARTIAL, sharded(group.dim)), builder)
    return _write_sum(name, Step(group.reduce_axes, PARTIAL, INVARIANT), builder)


def _write_sum(name: str, step: Step, builder: OpBuilder) -> str:
    """Writes a reduction of gradients, in the element type that the plan chooses for what is
    sent.
    """
    if not step.axes:
        return name
    dtype = builder.types[name].dtype
    sent = PRECISIONS.get(builder.program.train.reduce or "", dtype)
    return builder.cast(builder.coerce(builder.cast(name, sent), step), dtype)


# ---- in each layer of a repeat

Layer = Callable[[str], tuple[Sequence[Stmt], Sequence[Stmt], str]]
"""From a layer's slice of its repeat's argument, "" for none: statements before and after it,
and its result.
"""


def with_gathers(group: BucketGroup, block: Region, part: str, builder: OpBuilder) -> Region:
    """The block `forward` where each layer gathers its parameters."""
    weights = list[Value]()
    for param in group.params:
        if param.loops:
            weights.append(Value(param.loops.weight, builder.types[param.loops.weight]))

    def layer(slice: str) -> tuple[Sequence[Stmt], Sequence[Stmt], str]:
        ahead = builder.inner()
        write_gather(group, slice, weights, ahead)
        return ahead.body, (), ""

    return evolve(block, body=_within(block.body, group.loops.forward, part, layer, builder)[0])


def with_reductions(
    group: BucketGroup, block: Region, part: str, builder: OpBuilder
) -> tuple[Region, str]:
    """The block `backward` where each layer gathers `part`, if it is not "", a second time; and
    the reduced gradients.
    """
    loops = [param.loops for param in group.params if param.loops]
    gradients = tuple(place.gradient for place in loops)

    def layer(slice: str) -> tuple[Sequence[Stmt], Sequence[Stmt], str]:
        before, after = builder.inner(), builder.inner()
        if slice:
            weights = [
                _weight_for_backward(place.weight, place.regathered, builder) for place in loops
            ]
            write_gather(group, slice, weights, before)
        if group.shard_gradients:
            total = write_reduction(group, gradients, after)
            return before.body, after.body, total
        after.append(Op("begin", gradients, (), (("bucket", group.name),), span=builder.span))
        return before.body, after.body, ""

    body, total = _within(block.body, group.loops.backward, part, layer, builder)
    return evolve(block, body=body), total


def _weight_for_backward(weight: str, name: str, builder: OpBuilder) -> Value:
    if name:
        return Value(name, builder.types[name])
    return builder.value(weight, builder.types[weight])


def _within(
    body: tuple[Stmt, ...], path: Path, part: str, layer: Layer, builder: OpBuilder
) -> tuple[tuple[Stmt, ...], str]:
    """The body with `layer` around the region at `path`, which gets slices of `part`; the stack of
    what the layer makes.
    """
    region, types = regions_in(body)[path[0]], builder.types
    index = body.index(region)
    slice = ""
    if part:
        value = builder.value(part, types[part].inside(region.dim))
        region = evolve(region, args=(*region.args, Arg(value, part, Enter.EACH)))
        slice = value.name
    if path[1:]:
        inner, result = _within(region.body, path[1:], slice, layer, builder)
    else:
        ahead, following, result = layer(slice)
        inner = (*ahead, *region.body, *following)
    region = evolve(region, body=inner)
    if not result:
        return (*body[:index], region, *body[index + 1 :]), ""
    stack = builder.value(result, types[result].stack_along(region.dim))
    region = evolve(
        region,
        yields=(*region.yields, Yield(result, Leave.STACK)),
        results=(*region.results, stack),
    )
    return (*body[:index], region, *body[index + 1 :]), stack.name
