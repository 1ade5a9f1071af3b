"""What each layer of a repeat does with its own buffer of a bucket.

Purpose: in forward it is gathered before the layer, and in backward again; behind the layer's backward its gradient is
reduced, or, where gradients add up over microbatches first, its reduction `begin`s in the last of these.
Before: the slices of stacks that this replaces are gone (`param_loops.without`).  Non-goals: which buckets (`assign`).
"""

from collections.abc import Callable, Sequence

from attrs import evolve

from ...ir import Arg, Enter, Leave, Op, Region, Stmt, Value, Yield, regions_in
from .assign import BucketGroup
from .builder import Lines
from .param_loops import Path
from .step_comms import gathered, reduced

Inner = Callable[[tuple[Stmt, ...], Sequence[Value]], tuple[tuple[Stmt, ...], Sequence[Value]]]
"""From a layer's body and its slices of what it is given to its new body and what it hands out."""


def forward(group: BucketGroup, block: Region, part: Value, lines: Lines) -> Region:
    """The block `forward` in which each layer gathers its parameters."""

    def gather(body: tuple[Stmt, ...], slices: Sequence[Value]) -> tuple[tuple[Stmt, ...], Sequence[Value]]:
        weights = [Value(p.home.weight, lines.types[p.home.weight]) for p in group.params if p.home]
        inner = lines.elsewhere()
        gathered(group, slices[0], weights, inner)
        return (*inner.ops, *body), ()

    return evolve(block, body=_inside(block.body, group.home.forward, [part], gather, lines)[0])


def backward(group: BucketGroup, block: Region, part: Value | None, lines: Lines) -> tuple[Region, Value | None]:
    """The block `backward` in which each layer gathers `part`, if given, again, and what it reduces of all layers."""

    def again(slices: Sequence[Value]) -> list[Op]:
        inner = lines.elsewhere()
        for value in slices:
            gathered(group, value, [_again(p.home.weight, p.home.again, lines) for p in group.params if p.home], inner)
        return inner.ops

    def reduce(body: tuple[Stmt, ...], slices: Sequence[Value]) -> tuple[tuple[Stmt, ...], Sequence[Value]]:
        inner, gradients = lines.elsewhere(), [p.home.gradient for p in group.params if p.home]
        if not group.shard_gradients:
            inner.give("begin", gradients, (), bucket=group.name)
            return (*again(slices), *body, *inner.ops), ()
        total = reduced(group, gradients, inner)
        return (*again(slices), *body, *inner.ops), (total,)

    given = [part] if part else []
    body, made = _inside(block.body, group.home.backward, given, reduce, lines)
    return evolve(block, body=body), made[0] if made else None


def _again(weight: str, again: str, lines: Lines) -> Value:
    return Value(again, lines.types[again]) if again else lines.value(weight, lines.types[weight])


def _inside(
    body: tuple[Stmt, ...], path: Path, given: Sequence[Value], write: Inner, lines: Lines
) -> tuple[tuple[Stmt, ...], list[Value]]:
    """The body with its region at `path` written anew, and the stacks of what the region hands out."""
    region = regions_in(body)[path[0]]
    at = body.index(region)
    slices = [lines.value(value.name, value.type.inside(region.dim)) for value in given]
    inner, made = _inside(region.body, path[1:], slices, write, lines) if path[1:] else write(region.body, slices)
    stacks = [lines.value(value.name, value.type.stacked(region.dim)) for value in made]
    args = (Arg(part, value.name, Enter.EACH) for part, value in zip(slices, given, strict=True))
    region = evolve(
        region,
        body=inner,
        args=(*region.args, *args),
        yields=(*region.yields, *(Yield(value.name, Leave.STACK) for value in made)),
        results=(*region.results, *stacks),
    )
    return (*body[:at], region, *body[at + 1 :]), stacks
