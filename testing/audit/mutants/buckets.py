"""Mistakes with flat buffers that ranks share out or that each layer has: weights of the step
before, of another layer, reduced twice, or not in one layer.

Non-goals: what can go wrong with any coercion, flat or not (`coercions`), or any repeat
(`regions`).
"""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from attrs import evolve

from ....compiler.ir import (
    INVARIANT,
    PARTIAL,
    Arg,
    Attr,
    Bucket,
    Enter,
    Kind,
    Op,
    Program,
    Region,
    Type,
    Value,
    defs,
)
from ....compiler.ir.placements import ends
from ....compiler.syntax.source import Span
from .coercions import acting, label, silent
from .edits import Edit, aside, ops, regions, replaced, then, with_stack

Found: TypeAlias = Iterator[tuple[str, Span, Program]]


def _flat(program: Program, among: Iterable[Op]) -> list[Op]:
    """The coercions, among some ops, that change a rank's part of a bucket's buffers."""
    active = {id(op) for op in acting(program, program.region)}
    return [op for op in among if id(op) in active and _bucket_of(program, op.outputs[0])]


def _weights_before(program: Program) -> Found:
    """A gather is left out: parameters that other ranks have updated keep their old values on a
    rank.
    """
    for op in _flat(program, program.ops):
        if ends(op)[0].kind is Kind.SHARDED:
            yield f"{label(op)} not seen", op.span, replaced(program, op, evolve(op, kind="unseen"))


def _next_layer(program: Program) -> Found:
    """A layer takes the part of the weights that the layer after it needs."""
    for region in _of_several(program):
        for i, arg in enumerate(region.args):
            if arg.enter is Enter.EACH and _bucket_of(program, arg.value):
                other = replaced(program, region, *with_stack(region, i, "behind"))
                yield f"{arg.value.name} of the next layer", region.span, other


def _layers_exchanged(program: Program) -> Found:
    """The gradient of each layer is another's: of those that layers reduce, or of those that
    the step packs.
    """
    params = {param.name for param in program.params}
    for region in _of_several(program):
        for i, value in enumerate(region.results):
            if _bucket_of(program, value):
                flipped = Op("flipped", (aside(value).name,), (value,), span=region.span)
                wrong = replaced(program, region, _with_result(region, i, aside(value)), flipped)
                yield f"layers of {value.name} exchanged", region.span, wrong
    for op in _ops(program.region):
        if op.kind == "pack" and op.inputs[0] not in params:
            (value,) = op.outputs
            if value.type.dims[:-1] and program.size(value.type.dims[0]) > 1:
                yield (
                    f"layers of {value.name} exchanged",
                    op.span,
                    replaced(program, op, *then(op, "flipped")),
                )


def _bucket_of(program: Program, value: Value) -> Bucket | None:
    """The bucket that has a value among its buffers."""
    return next((bucket for bucket in program.buckets if bucket.dim in value.type.dims), None)


def _with_result(region: Region, index: int, value: Value) -> Region:
    return evolve(region, results=(*region.results[:index], value, *region.results[index + 1 :]))


def _of_several(program: Program) -> list[Region]:
    return [region for region in regions(program, "repeat") if program.size(region.dim) > 1]


def _reduced_twice(program: Program) -> Found:
    """A gradient is reduced in each layer, and also in the step."""
    for region in regions(program, "microbatches"):
        for i, value in enumerate(region.results):
            bucket = _bucket_of(program, value)
            axes = bucket.shard_axes if bucket else ()
            if program.degree(axes) > 1:
                again = Op(
                    "coerce",
                    (aside(value).name,),
                    (value,),
                    tuple(_summed(axes).items()),
                    span=region.span,
                )
                wrong = replaced(program, region, _with_result(region, i, aside(value)), again)
                yield f"{value.name} reduced in the step too", region.span, wrong
    for op in ops(program, "begin"):
        yield from _reduced_before(program, op)


def _summed(axes: tuple[str, ...]) -> dict[str, Attr]:
    return {"axes": axes, "from": PARTIAL, "to": INVARIANT}


def _reduced_before(program: Program, begin: Op) -> Found:
    """A reduction of the step is done in the layer too."""
    makers = defs(program.ops)
    axes = program.types[begin.inputs[0]].axes_in(Kind.PARTIAL)
    if program.degree(axes) == 1:
        return
    wrong = program
    for name in begin.inputs:
        op = makers[name]
        wrong = replaced(wrong, op, *then(op, "coerce", **_summed(axes)))
    yield f"{', '.join(begin.inputs)} reduced in the layer too", begin.span, wrong


def _one_layer(program: Program) -> Found:
    """A coercion of a layer's buffer is left out in the first layer, where shapes are what they
    would be.
    """
    for region in regions(program, "repeat"):
        for op in _flat(program, _ops(region)):
            yield f"{label(op)} left out in one layer", op.span, _marked(program, region, op)
    for op in _flat(program, _ops(program.region)):
        (value,) = op.outputs
        if value.type.dims[:-1] and ends(op)[0] == PARTIAL:
            mark = _mark(value.type.dims[0])
            wrong = replaced(program, op, _marks(mark, op), *_chosen(op, mark))
            yield f"{label(op)} left out in one layer", op.span, wrong


def _ops(region: Region) -> list[Op]:
    return [stmt for stmt in region.body if isinstance(stmt, Op)]


def _marked(program: Program, region: Region, op: Op) -> Program:
    """With a repeat that is told which layer is the first, and leaves the coercion out there."""
    mark = _mark(region.dim)
    each = Arg(Value(f"{mark.name}.1", Type("i64", ())), mark.name, Enter.EACH)
    body = tuple(
        s for stmt in region.body for s in (_chosen(op, each.value) if stmt is op else (stmt,))
    )
    return replaced(
        program, region, _marks(mark, op), evolve(region, body=body, args=(*region.args, each))
    )


def _mark(dim: str) -> Value:
    return Value("first'", Type("i64", (dim,)))


def _marks(mark: Value, op: Op) -> Op:
    return Op("marks", (), (mark,), span=op.span)


def _chosen(op: Op, mark: Value) -> tuple[Op, Op, Op]:
    """The coercion, what makes its shapes without its communication, and the latter where there
    is a mark.
    """
    (value,) = op.outputs
    done, left = aside(value), aside(aside(value))
    inputs = (mark.name, done.name, left.name)
    choice = Op("chosen", inputs, (value,), span=op.span)
    return evolve(op, outputs=(done,)), evolve(silent(op), outputs=(left,)), choice


FAMILIES: dict[str, Edit] = {
    "weights of the step before": _weights_before,
    "weights of the next layer": _next_layer,
    "gradients of layers exchanged": _layers_exchanged,
    "reduced in the layer and in the step": _reduced_twice,
    "left out in one layer": _one_layer,
}
