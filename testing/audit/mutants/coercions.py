"""Mistakes in a coercion: left out, done twice, of another kind, over other axes, of another
dim, with wrong shards.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

from ....compiler.ir import (
    INVARIANT,
    MAXIMUM,
    PARTIAL,
    REPLICATED,
    Kind,
    Op,
    Program,
    Region,
    base,
    sharded,
    walk,
)
from ....compiler.ir.placements import coercion_of, conjugate, ends
from ....compiler.syntax.source import Span
from .edits import Edit, before, instead, regions, replaced, then, wide, with_attrs

I, R, S, P, M = Kind.INVARIANT, Kind.REPLICATED, Kind.SHARDED, Kind.PARTIAL, Kind.MAXIMUM  # noqa: E741

Mistakes: TypeAlias = Iterator[tuple[str, Sequence[Op]]]
"""Words for each mistake, and the ops in place of the coercion."""

IDLE = ((I, R), (R, I))
IDEMPOTENT = ((I, P), (R, P), (M, R), (M, I))


def _kinds(op: Op) -> tuple[Kind, Kind]:
    source, target = ends(op)
    return source.kind, target.kind


def acting(program: Program, region: Region) -> list[Op]:
    """The coercions in a region that change what a rank holds."""
    found = [op for op in walk(region.body) if op.kind == "coerce" and _kinds(op) not in IDLE]
    return [op for op in found if program.degree(op.names("axes")) > 1]


def label(op: Op) -> str:
    """For instance `all_reduce of z over tp`."""
    return f"{coercion_of(op).function} of {op.inputs[0]} over {' x '.join(op.names('axes'))}"


def _left_out(program: Program, op: Op) -> Mistakes:
    yield "left out", [instead(op, "kept")]


def _twice(program: Program, op: Op) -> Mistakes:
    if _kinds(op) not in IDEMPOTENT:
        yield "done twice", then(op, "coerce", **dict(op.attrs))


def _other_kind(program: Program, op: Op) -> Mistakes:
    match _kinds(op):
        case (Kind.PARTIAL, Kind.INVARIANT):
            yield from _other_sum(program, op)
        case (Kind.PARTIAL, Kind.SHARDED):
            yield "averaged", then(op, "divided", axes=op.names("axes"))
            yield "without the sum", [silent(op)]
        case (Kind.SHARDED, Kind.INVARIANT | Kind.REPLICATED):
            yield "replaced by the own part repeated", [silent(op)]
            yield "replaced by padding", [with_attrs(op, target=PARTIAL)]
        case (Kind.INVARIANT | Kind.REPLICATED, Kind.SHARDED):
            yield "with a sum of the copies", [with_attrs(op, source=PARTIAL)]
        case (Kind.SHARDED, Kind.PARTIAL):
            yield "replaced by a gather", [with_attrs(op, target=REPLICATED)]
        case (Kind.MAXIMUM, _):
            yield "as a sum", [with_attrs(op, source=PARTIAL, target=INVARIANT)]
        case _:
            # zero but on one rank, and all-to-all: the other families have all that can be said of
            # them
            pass


def _other_sum(program: Program, op: Op) -> Mistakes:
    axes = op.names("axes")
    if not _only_first_counts(program, op):
        yield "replaced by the first rank's value", [instead(op, "of_first", axes=axes)]
    # counts are integers, which have no shares and no order in the field
    if op.outputs[0].type.differentiable:
        yield "averaged", then(op, "divided", axes=axes)
        yield "as a maximum", [with_attrs(op, source=MAXIMUM)]


def _only_first_counts(program: Program, op: Op) -> bool:
    """Whether a sum over stages is of what the first rank alone has counted."""
    squares = [each for each in program.ops if each.kind == "sum_squares"]
    counted = [each.outputs[0].name for each in squares if each.names("once")[:1] == ("0",)]
    return op.inputs[0] in counted and len(op.names("axes")) == 1


def silent(op: Op) -> Op:
    """An op that gives the coercion's shapes without its communication."""
    source, _ = ends(op)
    match _kinds(op):
        case (Kind.PARTIAL, Kind.SHARDED):
            return with_attrs(op, source=INVARIANT)
        case (Kind.SHARDED, Kind.INVARIANT | Kind.REPLICATED):
            return instead(op, "repeated", axes=op.names("axes"), dim=source.dim)
        case _:
            return instead(op, "kept")


def _other_axes(program: Program, op: Op) -> Mistakes:
    own, every = [axis for axis in op.names("axes") if axis in wide(program)], wide(program)
    others = [axis for axis in every if axis not in own]
    fewer = [[axis for axis in own if axis != less] for less in own] if len(own) > 1 else []
    type = program.types[op.inputs[0]]
    # copies have one maximum
    apart = [axis for axis in others if _kinds(op)[0] is not M or type.placement_on(axis).kind is S]
    more = [[axis for axis in every if axis in own or axis == extra] for extra in apart]
    for axes in (*fewer, *([axis] for axis in others), *more):
        yield f"done over {' x '.join(axes)} instead", [with_attrs(op, axes=tuple(axes))]


def _other_dim(program: Program, op: Op) -> Mistakes:
    source, target = ends(op)
    for end, place in (("source", source), ("target", target)):
        for dim in op.outputs[0].type.dims if place.dim else ():
            if dim != place.dim:
                yield f"along {dim} instead of {place.dim}", [with_attrs(op, **{end: sharded(dim)})]


def _ranks_mixed(fault: str, program: Program, op: Op) -> Mistakes:
    """Mixed shards that enter, or else leave; in a sum it does not matter who holds which part."""
    source, target = ends(op)
    for axis in op.names("axes"):
        if program.axis(axis).size == 1:
            continue
        if source.dim:
            type = program.types[op.inputs[0]]
            yield f"of shards {fault} along {axis}", before(op, 0, type, fault, axes=(axis,))
        elif target.dim:
            yield f"into shards {fault} along {axis}", then(op, fault, axes=(axis,))


def _each(mistakes: Callable[[Program, Op], Mistakes]) -> Edit:
    """The mistakes that can be made in one coercion, made in each."""

    def family(program: Program) -> Iterator[tuple[str, Span, Program]]:
        for op in acting(program, program.region):
            for words, ops in mistakes(program, op):
                yield f"{label(op)} {words}", op.span, replaced(program, op, *ops)

    return family


def _with_conjugate(program: Program) -> Iterator[tuple[str, Span, Program]]:
    """Both left out, with the shapes kept, as if the coercion were not known of."""
    forward, backward = (
        [op for r in regions(program, kind) for op in acting(program, r)] for kind in BLOCKS
    )
    left = backward[::-1]
    for op in forward:
        partner = next((other for other in left if _conjugate(op, other)), None)
        if partner:
            left.remove(partner)
            without = replaced(program, op, silent(op))
            yield (
                f"{label(op)} and its conjugate",
                op.span,
                replaced(without, partner, silent(partner)),
            )


BLOCKS = ("forward", "backward")


def _conjugate(op: Op, other: Op) -> bool:
    """Whether `other` is the backward of `op`."""
    source, target = ends(op)
    return (
        source.kind is not M
        and ends(other) == conjugate(source, target)
        and (other.names("axes"), other.span) == (op.names("axes"), op.span)
        and base(other.outputs[0].name) == f"d_{base(op.outputs[0].name)}"
    )


FAMILIES: dict[str, Edit] = {
    "coercion left out": _each(_left_out),
    "left out with its conjugate": _with_conjugate,
    "coercion done twice": _each(_twice),
    "coercion of another kind": _each(_other_kind),
    "coercion over other axes": _each(_other_axes),
    "coercion along another dim": _each(_other_dim),
    "shards shifted by a rank": _each(partial(_ranks_mixed, "shifted")),
    "shards of two ranks exchanged": _each(partial(_ranks_mixed, "exchanged")),
}
