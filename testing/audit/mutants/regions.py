"""Mistakes in what runs several times: microbatches, the layers of a repeat, and what backward
keeps of them.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import TypeAlias

from attrs import evolve

from ....compiler.ir import (
    MICROBATCHES,
    Arg,
    Enter,
    Leave,
    Op,
    Program,
    Region,
    Value,
    rename,
    uses,
    walk,
)
from ....compiler.syntax.source import Span
from .edits import Edit, aside, regions, replaced, with_input, with_stack

Found: TypeAlias = Iterator[tuple[str, Span, Program]]

LIKE = {
    "embedding": {"table"},
    "rmsnorm": {"weight"},
    "layernorm": {"weight", "bias"},
    "rms_scaled": {"weight"},
}
"""Weights that ops are linear in: their own gradients read the first of them for its shape
alone.
"""


def _last_microbatch(program: Program) -> Found:
    """Instead of the sum over microbatches: a gradient, or the loss."""
    for region in _of_several(program, "microbatches"):
        for i, end in enumerate(region.yields):
            value = region.results[i]
            stack = aside(evolve(value, type=value.type.stack_along(region.dim)))
            kept = _with_end(region, i, Leave.STACK, stack)
            last = Op("last", (stack.name,), (value,), span=region.span)
            yield (
                f"only the last microbatch's {end.name}",
                region.span,
                replaced(program, region, kept, last),
            )


def _averaged(program: Program) -> Found:
    for region in _of_several(program, "microbatches"):
        for i, end in enumerate(region.yields):
            value = region.results[i]
            summed = _with_end(region, i, end.leave, aside(value))
            mean = Op(
                "divided",
                (aside(value).name,),
                (value,),
                (("dims", (MICROBATCHES,)),),
                span=region.span,
            )
            yield (
                f"{end.name} divided by the number of microbatches",
                region.span,
                replaced(program, region, summed, mean),
            )


def _of_several(program: Program, kind: str) -> list[Region]:
    return [region for region in regions(program, kind) if program.size(region.dim) > 1]


def _with_end(region: Region, index: int, leave: Leave, result: Value) -> Region:
    """The region with another result at `index`."""
    yields, results = list(region.yields), list(region.results)
    yields[index], results[index] = evolve(yields[index], leave=leave), result
    return evolve(region, yields=tuple(yields), results=tuple(results))


def _carried(region: Region) -> list[Arg]:
    """The values that change from one iteration to the next."""
    carried = [arg for arg in region.args if arg.enter is Enter.CARRY]
    ends = [end.name for end in region.yields if end.leave is Leave.LAST]
    return [arg for arg, end in zip(carried, ends, strict=True) if end != arg.value.name]


def _carry_lost(program: Program) -> Found:
    """Every iteration begins with what the first begins with."""
    for region in _of_several(program, "repeat"):
        for arg in _carried(region):
            lost = rename(region, {arg.value.name: arg.source})
            yield f"{arg.value.name} not carried", region.span, replaced(program, region, lost)


def _order(program: Program) -> Found:
    for region in _of_several(program, "repeat"):
        if _carried(region) and _slices(region):
            turned = evolve(region, reverse=not region.reverse)
            way = "forward" if region.reverse else "backward"
            yield (
                f"repeat over {region.dim} run {way}",
                region.span,
                replaced(program, region, turned),
            )


def _between(block: Region, first: Region, second: Region) -> set[str]:
    """The values made between two statements of a block."""
    at = [id(stmt) for stmt in block.body]
    ops = block.body[at.index(id(first)) + 1 : at.index(id(second))]
    return {value.name for op in ops if isinstance(op, Op) for value in op.outputs}


def _exchanged(program: Program) -> Found:
    """Two repeats in a row, each run where the other should be: parts of one that branches
    divide.
    """
    for block in regions(program, "forward", "backward", "repeat"):
        for first, second in pairwise(stmt for stmt in block.body if isinstance(stmt, Region)):
            carried = [
                [arg for arg in region.args if arg.enter is Enter.CARRY]
                for region in (first, second)
            ]
            handed = [value.name for value, _ in zip(first.results, carried[0], strict=False)]
            types = [[arg.value.type for arg in args] for args in carried]
            alike = (
                types[0] == types[1]
                and handed == [arg.source for arg in carried[1]]
                and first.dim != second.dim
            )
            if alike and not _between(block, first, second) & {*uses(second)}:
                place = {id(first): _as(second, first), id(second): _as(first, second)}
                turned = evolve(block, body=tuple(place.get(id(stmt), stmt) for stmt in block.body))
                words = f"{first.dim} and {second.dim} exchanged in {block.kind}"
                yield words, first.span, replaced(program, block, turned)


def _as(region: Region, other: Region) -> Region:
    """A repeat that carries what another does, from there and to there."""
    sources = iter([arg.source for arg in other.args if arg.enter is Enter.CARRY])
    args = tuple(
        evolve(a, source=next(sources)) if a.enter is Enter.CARRY else a for a in region.args
    )
    lasts = [
        value
        for value, end in zip(other.results, other.yields, strict=True)
        if end.leave is Leave.LAST
    ]
    rest = [
        value
        for value, end in zip(region.results, region.yields, strict=True)
        if end.leave is not Leave.LAST
    ]
    return evolve(region, args=args, results=(*lasts, *rest))


def _slices(region: Region) -> list[Arg]:
    return [arg for arg in region.args if arg.enter is Enter.EACH]


def _other_layer(program: Program) -> Found:
    """Layers take the slices of a parameter, or of what backward keeps, in the opposite order."""
    for region in _of_several(program, "repeat"):
        for i, arg in enumerate(region.args):
            if arg.enter is Enter.EACH and not _says_shape(region, arg.value.name):
                turned = replaced(program, region, *with_stack(region, i, "flipped"))
                yield f"{arg.value.name} of another layer", region.span, turned


def _recomputed_with_other_layer(program: Program) -> Found:
    """Backward recomputes a value with the slice of another layer; its gradient is that of its
    own.
    """
    done = {
        (op.kind, op.attrs, op.span.line)
        for block in regions(program, "forward")
        for op in walk(block.body)
    }
    for backward in regions(program, "backward"):
        for region in _of_several(evolve(program, region=backward), "repeat"):
            again = [
                op
                for op in region.body
                if isinstance(op, Op) and (op.kind, op.attrs, op.span.line) in done
            ]
            for i, arg in enumerate(region.args):
                for op in again if arg.enter is Enter.EACH else ():
                    if arg.value.name in op.inputs:
                        words = (
                            f"{op.outputs[0].name} recomputed with {arg.value.name} of another"
                            " layer"
                        )
                        yield (
                            words,
                            op.span,
                            replaced(program, region, *_reading_other(region, i, op)),
                        )


def _reading_other(region: Region, index: int, op: Op) -> tuple[Op, Region]:
    """The region with a second slice for its argument `index`, from the other end, which `op`
    alone reads.
    """
    arg = region.args[index]
    flipped, turned = with_stack(region, index, "flipped")
    other = evolve(turned.args[index], value=aside(arg.value))
    names = {arg.value.name: other.value.name}
    reading = evolve(op, inputs=tuple(names.get(name, name) for name in op.inputs))
    body = tuple(reading if stmt is op else stmt for stmt in region.body)
    return flipped, evolve(region, args=(*region.args, other), body=body)


def _says_shape(region: Region, name: str) -> bool:
    """Whether a value is read for its shape only."""
    reads = [
        _of_shape(op, i)
        for op in walk(region.body)
        for i, read in enumerate(op.inputs)
        if read == name
    ]
    return bool(reads) and all(reads)


def _of_shape(op: Op, operand: int) -> bool:
    """Whether an op reads an operand for its shape only: of a `vjp`, those after dy and the
    first operand.
    """
    return (
        op.kind == "vjp"
        and operand == 2
        and {*op.names("wrt")} <= LIKE.get(str(op.get("of")), {""})
    )


def _other_kept(program: Program) -> Found:
    """An op of backward reads another saved value of the layer, of the same type."""
    for backward in regions(program, "backward"):
        for region in regions(evolve(program, region=backward), "repeat"):
            for op in region.body:
                if isinstance(op, Op):
                    yield from _swapped_operands(program, region, op)


def _swapped_operands(program: Program, region: Region, op: Op) -> Found:
    kept = {arg.value.name: arg for arg in _slices(region)}
    for i, name in enumerate(op.inputs):
        if name in kept and not _of_shape(op, i):
            other = _another(kept, name, op)
            if other:
                words = f"{op.outputs[0].name} made of {other} instead of {name}"
                yield words, op.span, replaced(program, op, with_input(op, i, other))


def _another(kept: dict[str, Arg], name: str, op: Op) -> str | None:
    arg = kept[name]
    return next(
        (
            other
            for other, its in kept.items()
            if its.value.type == arg.value.type and its.source != arg.source
        ),
        None,
    )


def _part_of_gradient(program: Program) -> Found:
    """One gradient of a value with several uses is lost: tied parameters, residuals, q, k and v."""
    for op in _sums_of_gradients(program):
        for i, name in enumerate(op.inputs):
            others = evolve(op, inputs=(*op.inputs[:i], *op.inputs[i + 1 :]))
            yield f"{name} lost from {op.outputs[0].name}", op.span, replaced(program, op, others)
            twice = evolve(op, inputs=(*op.inputs, name))
            yield (
                f"{name} counted twice in {op.outputs[0].name}",
                op.span,
                replaced(program, op, twice),
            )


def _sums_of_gradients(program: Program) -> list[Op]:
    """All sums but those of the model."""
    model = [id(op) for region in regions(program, "forward") for op in walk(region.body)]
    return [op for op in program.ops if op.kind == "add" and id(op) not in model]


FAMILIES: dict[str, Edit] = {
    "the last microbatch alone": _last_microbatch,
    "divided by microbatches": _averaged,
    "carry of a repeat lost": _carry_lost,
    "repeat in the wrong direction": _order,
    "slices of another layer": _other_layer,
    "recomputed with slices of another layer": _recomputed_with_other_layer,
    "repeats exchanged": _exchanged,
    "wrong value saved for backward": _other_kept,
    "part of a gradient lost or doubled": _part_of_gradient,
}
