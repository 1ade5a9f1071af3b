"""Mistakes around forward and backward: the count of labels, the norm, clipping, the update,
and the parts of ranks.
"""

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import TypeAlias

from attrs import evolve

from ....compiler.ir import (
    INVARIANT,
    MICROBATCHES,
    PARTIAL,
    SEQUENCE,
    Kind,
    Op,
    Program,
    Type,
    defs,
    sharded,
)
from ....compiler.ir.placements import ends
from ....compiler.ops import VJPS
from ....compiler.ops.attention import head_dims, window_of
from ....compiler.syntax.source import Span
from .edits import Edit, aside, before, instead, ops, replaced, then, wide, with_input

Found: TypeAlias = Iterator[tuple[str, Span, Program]]

GATES = ("if_finite", "if_below")
"""Ops that make a count 0 where nothing is to change."""
COUNT = 2
"""The operand of an update, of parameters or of biases, that is the count."""


def _makers(program: Program) -> dict[str, Op]:
    """The op that makes each value."""
    return defs(program.ops)


def _count(program: Program) -> Found:
    for op in ops(program, "reciprocal"):
        yield (
            "loss and gradients not divided by the count",
            op.span,
            replaced(program, op, instead(op, "one")),
        )
    for op in ops(program, "count_valid"):
        yield (
            "tokens without a label counted",
            op.span,
            replaced(program, op, instead(op, "counted_all")),
        )
        if program.size(MICROBATCHES) > 1:
            first = replaced(program, op, instead(op, "counted_first"))
            yield "only the first microbatch's labels counted", op.span, first
    for op in ops(program, "update"):
        yield from _own_count(program, op)


def _own_count(program: Program, op: Op) -> Found:
    """Each rank decides by its own count whether to update."""
    *_, first = _gates(program, op)
    reduced = _makers(program)[first.inputs[0]]
    if reduced.kind == "coerce":
        own = with_input(op, 2, reduced.inputs[0])
        yield (
            f"update of {op.inputs[3]} by the rank's own count",
            op.span,
            replaced(program, op, own),
        )


def _gates(program: Program, op: Op) -> Iterator[Op]:
    """The ops that decide whether an update changes anything, the last first."""
    makers, count = _makers(program), op.inputs[COUNT]
    while (made := makers.get(count)) and made.kind in GATES:
        yield made
        count = made.inputs[0]


def _skipping(program: Program) -> Found:
    """An update does not look whether values are finite, or the loss is a spike; or ranks
    decide apart of a spike.
    """
    for op in (*ops(program, "update"), *ops(program, "balanced")):
        at, what = COUNT, op.inputs[3 if op.kind == "update" else 0]
        for gate in _gates(program, op):
            free = with_input(op, at, gate.inputs[0])
            yield f"{op.kind} of {what} without {gate.kind}", op.span, replaced(program, op, free)
    for gate in ops(program, "if_below"):
        yield from _decided_apart(program, gate)


def _decided_apart(program: Program, gate: Op) -> Found:
    """By the rank's own part of the loss, before its sum over ranks."""
    makers = _makers(program)
    made = makers[gate.inputs[1]]
    for i, source in enumerate(made.inputs):
        summed = makers.get(source)
        if summed and summed.kind == "coerce" and program.degree(summed.names("axes")) > 1:
            own = evolve(with_input(made, i, summed.inputs[0]), outputs=(aside(made.outputs[0]),))
            words = f"{gate.kind} by the rank's own {source}"
            yield (
                words,
                gate.span,
                replaced(program, gate, own, with_input(gate, 1, own.outputs[0].name)),
            )


def _divided(program: Program) -> Found:
    """By the number of ranks, besides the count: loss and gradients, or the loss alone."""
    loss = _makers(program)[program.region.yields[0].name]
    for axes in _groups(program):
        for op in (*ops(program, "reciprocal"), loss):
            words = f"{op.outputs[0].name} divided by the ranks of {' x '.join(axes)}"
            yield words, op.span, replaced(program, op, *then(op, "divided", axes=axes))


def _groups(program: Program) -> list[tuple[str, ...]]:
    """Each axis, and all together."""
    every = tuple(wide(program))
    return [*((axis,) for axis in every), *([every] if len(every) > 1 else [])]


def _stale(program: Program) -> Found:
    """The update, or the norm, takes the gradient before its reduction."""
    for op in (*ops(program, "update"), *ops(program, "sum_squares")):
        for i, name in enumerate(op.inputs[:1] if op.kind == "update" else op.inputs):
            made = _makers(program).get(name)
            made = _makers(program)[made.inputs[0]] if made and made.kind == "cast" else made
            if made and made.kind == "coerce" and program.degree(made.names("axes")) > 1:
                early = with_input(op, i, made.inputs[0])
                yield (
                    f"{op.kind} takes {made.inputs[0]} before its reduction",
                    op.span,
                    replaced(program, op, early),
                )


def _squares(norm: Op) -> dict[int, str]:
    """The sums of squares in a norm, by their places: after the loss scale, if there is one."""
    first = norm.kind == "unscaled_norm"
    return dict(enumerate(norm.inputs[first:], first))


def _norm(program: Program) -> Found:
    for op in (*ops(program, "grad_norm"), *ops(program, "unscaled_norm")):
        squares = _squares(op)
        for i, name in squares.items() if len(squares) > 1 else ():
            less = evolve(op, inputs=(*op.inputs[:i], *op.inputs[i + 1 :]))
            yield f"norm without {name}", op.span, replaced(program, op, less)
        for i, name in squares.items():
            type = program.types[name]
            for axis in wide(program):
                added = before(
                    op, i, type, "coerce", axes=(axis,), **{"from": PARTIAL, "to": INVARIANT}
                )
                yield (
                    f"{name} added over {axis} in the norm",
                    op.span,
                    replaced(program, op, *added),
                )


def _clipping(program: Program) -> Found:
    """Where a norm is limited at all: not done, or by the norm of the bucket alone."""
    limited = [op for op in ops(program, "clip_scale") if op.get("max")]
    for clip in limited:
        for op in ops(program, "update"):
            free = before(op, 1, clip.outputs[0].type, "one")
            yield f"update of {op.inputs[3]} not clipped", op.span, replaced(program, op, *free)
        norm = _makers(program)[clip.inputs[0]]
        squares = _squares(norm)
        for name in squares.values() if len(squares) > 1 else ():
            own = evolve(
                norm, inputs=(*norm.inputs[: min(squares)], name), outputs=(aside(norm.outputs[0]),)
            )
            part = with_input(clip, 0, own.outputs[0].name)
            yield (
                f"clipped by the norm of {name} alone",
                clip.span,
                replaced(program, clip, own, part),
            )


def _scaling(program: Program) -> Found:
    """Where there is a loss scale: it is not applied, or not divided out."""
    for scale in (op.outputs[0].name for op in ops(program, "loss_scale")):
        for op in ops(program, "mul"):
            if op.inputs[1] == scale:
                yield (
                    "backward begins without the loss scale",
                    op.span,
                    replaced(program, op, instead(op, "kept")),
                )
        for op in ops(program, "unscaled"):
            yield (
                "update by gradients with their loss scale",
                op.span,
                replaced(program, op, instead(op, "kept")),
            )
            yield (
                "update takes the loss scale out twice",
                op.span,
                replaced(program, op, *_twice(op)),
            )
        for op in ops(program, "unscaled_norm"):
            scaled = evolve(op, kind="grad_norm", inputs=op.inputs[1:])
            yield "norm of gradients with their loss scale", op.span, replaced(program, op, scaled)


def _twice(op: Op) -> tuple[Op, Op]:
    """The op, and the same of its result."""
    own = aside(op.outputs[0])
    return evolve(op, outputs=(own,)), with_input(op, 0, own.name)


def _others_gradient(program: Program) -> Found:
    """Two parameters of one type take each other's gradient."""
    found = program.types
    for op in ops(program, "pack"):
        alike = [
            (i, j) for i, j in combinations(range(len(op.inputs)), 2) if _alike(found, op, i, j)
        ]
        for i, j in alike:
            a, b = op.inputs[i], op.inputs[j]
            yield (
                f"{a} and {b} exchanged",
                op.span,
                replaced(program, op, with_input(with_input(op, i, b), j, a)),
            )


def _others_shard(program: Program) -> Found:
    """Two ranks take the gradients of each other's shards of the parameters."""
    for op in ops(program, "update"):
        type = program.types[op.inputs[0]]
        for axis in type.axes_in(Kind.SHARDED):
            if program.axis(axis).size > 1:
                swapped = before(op, 0, type, "exchanged", axes=(axis,))
                yield (
                    f"{op.inputs[0]} of two ranks along {axis} exchanged",
                    op.span,
                    replaced(program, op, *swapped),
                )


def _alike(found: Mapping[str, Type], op: Op, i: int, j: int) -> bool:
    return found[op.inputs[i]] == found[op.inputs[j]]


def _positions(program: Program) -> Found:
    """Each rank takes its part of a vocabulary, of heads or of what is dropped from for the
    first.
    """
    found = program.types
    for op in program.ops:
        for dim, type in _indexed(program, op, [found[name] for name in op.inputs]):
            if program.degree(type.axes_of(dim)) > 1:
                first = instead(op, "as_first", **dict(op.attrs), **{"op": op.kind, "part of": dim})
                word = (
                    f"vjp of {op.get('of')} wrt {', '.join(op.names('wrt'))}"
                    if op.kind == "vjp"
                    else op.kind
                )
                words = f"{word}: every rank's part of {dim} taken for the first"
                yield words, op.span, replaced(program, op, first)


def _rank_order(program: Program) -> Found:
    """Chunks of a sequence that are taken, or put together, as if each rank held one part."""
    for op in program.ops:
        types = [program.types[name] for name in op.inputs]
        moved = [place.dim for place in ends(op) if place.dim] if op.kind == "coerce" else []
        over = {*((dim, axis) for dim in moved for axis in op.names("axes"))}
        over |= {
            (dim, axis) for dim, type in _indexed(program, op, types) for axis in type.axes_of(dim)
        }
        if any(program.axis(axis).size > 1 for _, axis in over & program.zigzags):
            taken = instead(op, "in_rank_order", **dict(op.attrs), op=op.kind)
            yield (
                f"{op.kind} of {op.inputs[0]}: chunks taken for parts",
                op.span,
                replaced(program, op, taken),
            )


def _indexed(program: Program, backward: Op, operands: list[Type]) -> list[tuple[str, Type]]:
    """The dims along which it matters to an op which part a rank holds, with the type of what
    it holds.
    """
    op, types = VJPS.forward(backward, operands)
    match op.kind:
        case "embedding":
            table = types[-1]
            return [(table.dims[0], table)]
        case "local_softmax_stats" | "logit_softmax_stats":
            return [(types[0].dims[-1], types[0])]
        case "linear_softmax_stats":
            return [(types[1].dims[0], types[1])]
        case "rescale_to_global_max" if op is backward:
            classes, axes = str(op.get("classes")), types[0].axes_in(Kind.MAXIMUM)
            return [
                (
                    classes,
                    Type(
                        types[0].dtype, (classes,), tuple((axis, sharded(classes)) for axis in axes)
                    ),
                )
            ]
        case "attention" | "ring_attention":
            q, k = types[:2]
            drops = "dropout" in dict(op.attrs)
            matters = op.get("mask") == "causal" or window_of(op) > 0
            by_heads = [
                (heads, q) for heads, few in [head_dims(q, k)] if program.size(few) > 1 or drops
            ]
            return by_heads + [(SEQUENCE, q)] * matters
        case "rope" | "rope_pair":
            return [(SEQUENCE, types[0])]
        case "dropout":
            return [(dim, types[0]) for dim in types[0].dims if dim != "batch"]
        case _:
            return []


FAMILIES: dict[str, Edit] = {
    "count of labels": _count,
    "steps that are skipped": _skipping,
    "divided by the ranks": _divided,
    "before the reduction": _stale,
    "gradient norm": _norm,
    "clipping": _clipping,
    "loss scale": _scaling,
    "another parameter's gradient": _others_gradient,
    "another rank's gradient": _others_shard,
    "part taken for the first": _positions,
    "chunks taken for parts": _rank_order,
}
