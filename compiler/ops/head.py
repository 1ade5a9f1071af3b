"""The last product and the cross entropy of its logits as one op, in which no rank ever holds its logits all at once.

Where each rank has the whole vocabulary it is one op.  Where ranks share it out, each first has the parts of its own
classes: the largest logit m, a sum of exponents z that is relative to it, and so one for each rank, and what its
classes have of the labels' logits, t.  `rejoined` brings them to what `softmax_parts` gives, once the ranks know the
largest of all.

Both read logits in chunks; their gradients make them again or are made with them (`scalec.runtime.kernels`, whose
`linear_cross_entropy` says what that costs).  Non-goals: where they stand (`passes.fuse_ops`).
"""

from collections.abc import Sequence
from math import prod

from attrs import evolve

from ..ir import ITEM_BYTES, MAXIMUM, PARTIAL, REPLICATED, Kind, Op, Placement, Program, Type, sharded
from .algebra import CONTRACT
from .loss import SMOOTHING, wide
from .protocol import Attribute, Builder, OpDef, Shape, TypingError, is_pending, takes
from .saved import Local, Saved

INNER = Attribute("inner", kinds=(tuple,))
CAP = Attribute("cap", default=0.0)
SHARES = Attribute("as", kinds=(str,))
CLASSES = Attribute("classes", kinds=(str,))


def classes_of(op: Op, weight: Type) -> str:
    """The dim of the logits that counts classes: the weight's that is not contracted."""
    found = [dim for dim in weight.dims if dim not in op.names("inner")]
    if len(found) != 1:
        raise TypingError(f"{op.kind} takes a weight with one dim of classes, not [{', '.join(found)}]")
    return found[0]


def tokens_of(op: Op, x: Type) -> tuple[str, ...]:
    """The dims of the operand besides those that are contracted."""
    return tuple(dim for dim in x.dims if dim not in op.names("inner"))


def _check(op: Op, x: Type, weight: Type, labels: Type) -> None:
    """Whether they are those of a product and of its labels."""
    over = op.names("inner")
    if x.dtype != weight.dtype or x.dims[-len(over) :] != over or weight.dims != (classes_of(op, weight), *over):
        raise TypingError(f"{op.kind} contracts the last dims of its operand with those of its weight")
    if labels.dims != tokens_of(op, x):
        raise TypingError(f"{op.kind} takes a label for each of [{', '.join(tokens_of(op, x))}]")


# ---- with the whole vocabulary on each rank


def _total(types: Sequence[Type], op: Op) -> list[Shape]:
    _check(op, *types)
    return [(wide(types[0].dtype), ())]


def _whole(types: Sequence[Type], op: Op) -> frozenset[str]:
    """All dims of the weight."""
    return frozenset(types[_weight_of(op)].dims)


def _weight_of(op: Op) -> int:
    return 2 if op.kind in (LINEAR_CROSS_ENTROPY_DX.name, LINEAR_CROSS_ENTROPY_DW.name) else 1


def _like_x(types: Sequence[Type], op: Op) -> list[Shape]:
    return [(types[1].dtype, types[1].dims)]


def _like_weight(types: Sequence[Type], op: Op) -> list[Shape]:
    return [(types[2].dtype, types[2].dims)]


def _whole_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    x, weight, _ = op.inputs
    back, attrs = [*grads, *map(b.saved, op.inputs)], dict(op.attrs)
    dx = b.emit(LINEAR_CROSS_ENTROPY_DX.name, back, [x], **attrs)[0] if b.wanted(x) else None
    dw = b.emit(LINEAR_CROSS_ENTROPY_DW.name, back, [weight], **attrs)[0] if b.wanted(weight) else None
    return [dx, dw, None]


def _gradients(it: Local) -> Saved:
    """Those of a loss that counts once, made with it."""
    return Saved(others=tuple((what, it.bytes(i)) for i, what in enumerate(GRADIENTS.values()) if it.wanted[i]))


# ---- a chunk of the logits


def few_columns(columns: int) -> int:
    """Of how many classes logits are made at a time: a sixteenth, but enough for large products."""
    return max(4096, -(-columns // (16 * 128)) * 128)


def few_tokens(columns: int) -> int:
    """Of how many tokens logits are made at a time: as few as are enough for large products."""
    return 1024


def _chunk(it: Local, x: int) -> tuple[int, int]:
    """The bytes of a chunk of logits, of the operand x and the weight behind it, and what their gradient takes there.

    A kernel puts it in their place; plain torch makes exponentials first, of a copy in float32 of what has fewer bits.
    """
    type, weight = it.types[x], it.types[x + 1]
    tokens = prod(it.program.local_size(type, dim) for dim in tokens_of(it.op, type))
    classes = it.program.local_size(weight, classes_of(it.op, weight))
    whole = it.op.kind.startswith(LINEAR_CROSS_ENTROPY.name)
    few = (min(tokens, few_tokens(classes)), classes) if whole else (tokens, min(classes, few_columns(classes)))
    item, wide = ITEM_BYTES[type.dtype], max(4, ITEM_BYTES[type.dtype])
    terms = 4 if "cap" in dict(it.op.attrs) else 1 + (item < wide)
    return prod(few) * item, 0 if it.launched else prod(few) * wide * terms


def _chunk_alone(it: Local) -> int:
    """Backward, or where it is done with forward, both."""
    return sum(_chunk(it, 0))


def _sum_of_chunks(it: Local) -> int:
    """The gradient of x adds up in float32, each part rounded first; that of the weight is made beside it."""
    (logits, terms), narrow = _chunk(it, 2), it.bytes(2) < it.widened(2)
    part = it.bytes(2) if narrow else 0
    total = it.widened(2) + it.bytes(3) + logits + max(terms, part)
    return total - it.bytes(2)


# ---- with a part of it


def _logits(program: Program, x: Type, weight: Type, op: Op) -> Type:
    single = Op(CONTRACT.name, (), (), (("over", op.names("inner")),), span=op.span)
    return CONTRACT.infer(program, (x, weight), single)[0]


def _part_types(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    x, weight, labels = types
    _check(op, x, weight, labels)
    classes, shares = classes_of(op, weight), str(op.get("as"))
    logits, tokens = _logits(program, x, weight, op), tokens_of(op, x)
    if is_pending(logits):
        raise TypingError(f"{op.kind} is not linear in what is partial")
    axes, float_ = logits.axes_of(classes), wide(x.dtype)
    if not axes or program.size(shares) != program.degree(axes):
        raise TypingError(f"{op.kind} gives one share for each rank over which {classes} lies")

    def placed(dims: tuple[str, ...], of_classes: Placement) -> Type:
        return Type(float_, dims, _moved(program, logits, axes, of_classes))

    return [placed(tokens, MAXIMUM), placed((*tokens, shares), sharded(shares)), placed(tokens, PARTIAL)]


def _moved(program: Program, type: Type, axes: Sequence[str], to: Placement) -> tuple[tuple[str, Placement], ...]:
    """The placements of a type, but on these axes."""
    return program.places(dict(type.places) | dict.fromkeys(axes, to))


def _part_dx(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    """As the product of the logits' gradient with the weight."""
    _, _, x, weight, *_ = types
    logits = _logits(program, x, weight, op)
    single = Op(CONTRACT.name, (), (), (("over", (classes_of(op, weight),)),), span=op.span)
    return [*CONTRACT.infer(program, (logits, weight), single)]


def _part_dw(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    """As the product of the logits' gradient with the operand."""
    _, _, x, weight, *_ = types
    logits = _logits(program, x, weight, op)
    single = Op(CONTRACT.name, (), (), (("over", tokens_of(op, x)),), span=op.span)
    return [*CONTRACT.infer(program, (logits, x), single)]


def _part_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    """m is taken as constant: its gradients through z, and through what `rejoined` makes of it, cancel."""
    x, weight, _ = op.inputs
    (_, dz, dt), m = grads, op.outputs[0].name
    back, attrs = [dz, dt, *map(b.saved, op.inputs), b.saved(m)], dict(op.attrs)
    dx = b.emit(LINEAR_PARTS_DX.name, back, [x], **attrs)[0] if b.wanted(x) else None
    dw = b.emit(LINEAR_PARTS_DW.name, back, [weight], **attrs)[0] if b.wanted(weight) else None
    return [dx, dw, None]


def _part_saves(it: Local) -> Saved:
    return Saved(operands=(0, 1, 2), results=(0,))


# ---- and together again


def _rejoined(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    m, z, t, peak, labels = types
    axes = m.axes_in(Kind.MAXIMUM)
    summed, largest = (Type(m.dtype, m.dims, _moved(program, m, axes, to)) for to in (PARTIAL, REPLICATED))
    shared = z.dims[:-1] == m.dims and z.axes_of(z.dims[-1]) == axes
    if not axes or is_pending(m) or not shared or (t, peak) != (summed, largest) or labels.dims != m.dims:
        raise TypingError(f"{op.kind} takes a share of each rank, and the largest of all")
    return [Type(m.dtype, m.dims, _moved(program, m, axes, PARTIAL))] * 2


def _rejoined_dz(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    _, m, _ = types
    shares = str(op.get("as"))
    return [Type(m.dtype, (*m.dims, shares), _moved(program, m, m.axes_in(Kind.MAXIMUM), sharded(shares)))]


def _rejoined_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    """z's gradient is that of its sum over ranks times exp(m − peak), t's is that of its sum."""
    (dz, dt), (m, z, _, peak, _) = grads, op.inputs
    shares = b.type(z).dims[-1]
    return [None, b.emit("rejoined_dz", [dz, b.saved(m), b.saved(peak)], [z], **{"as": shares})[0], dt, None, None]


def _rejoined_saves(it: Local) -> Saved:
    return Saved(others=(("exp(m - peak)", it.bytes(0)),))


LINEAR_CROSS_ENTROPY = OpDef(
    "linear_cross_entropy",
    "The cross entropy of the logits cap · tanh(x·w / cap), x·w where cap is 0: with smoothing and z as cross_entropy.",
    _total,
    operands=takes("x", "w", "labels"),
    attributes=(INNER, SMOOTHING, Attribute("z", default=0.0), CAP),
    whole=_whole,
    adjoint=_whole_adjoint,
    function="linear_cross_entropy",
    saves=_gradients,
    scratch=_chunk_alone,
)
LINEAR_CROSS_ENTROPY_DX = OpDef(
    "linear_cross_entropy_dx",
    "The gradient of linear_cross_entropy's operand.",
    _like_x,
    operands=takes("dy", "x", "w", "labels"),
    attributes=LINEAR_CROSS_ENTROPY.attributes,
    linear=((0,),),
    whole=_whole,
)
LINEAR_CROSS_ENTROPY_DW = evolve(
    LINEAR_CROSS_ENTROPY_DX,
    name="linear_cross_entropy_dw",
    doc="The gradient of its weight.",
    shapes=_like_weight,
)
GRADIENTS = {LINEAR_CROSS_ENTROPY_DX.name: "gradient", LINEAR_CROSS_ENTROPY_DW.name: "gradient of the weight"}
"""What forward keeps, and backward scales in place."""

LINEAR_PARTS = OpDef(
    "linear_parts",
    "Of this rank's classes, with logits as linear_cross_entropy's: m, the largest; z = Σ exp(logit − m), one for each"
    " rank, in the dim `as`; t, the label's logit, or 0 for a label elsewhere, with smoothing as softmax_parts'.",
    operands=takes("x", "w", "labels"),
    attributes=(INNER, SMOOTHING, CAP, SHARES),
    typing=_part_types,
    adjoint=_part_adjoint,
    function="linear_parts",
    saves=_part_saves,
    scratch=_chunk_alone,
)
LINEAR_PARTS_DX = OpDef(
    "linear_parts_dx",
    "The gradient of linear_parts' operand from those of z and t; m is taken as constant.",
    operands=takes("dz", "dt", "x", "w", "labels", "m"),
    attributes=LINEAR_PARTS.attributes,
    typing=_part_dx,
    scratch=_sum_of_chunks,
)
LINEAR_PARTS_DW = OpDef(
    "linear_parts_dw",
    "The gradient of its weight.",
    operands=LINEAR_PARTS_DX.operands,
    attributes=LINEAR_PARTS.attributes,
    typing=_part_dw,
)

REJOINED = OpDef(
    "rejoined",
    "What softmax_parts gives, of linear_parts': z · exp(m − peak), and t less the peak times what the labels have of"
    " this rank's part of `classes`.",
    operands=takes("m", "z", "t", "peak", "labels"),
    attributes=(SMOOTHING, CLASSES),
    typing=_rejoined,
    adjoint=_rejoined_adjoint,
    function="rejoined",
    saves=_rejoined_saves,
)
REJOINED_DZ = OpDef(
    "rejoined_dz",
    "The gradient of linear_parts' z from that of rejoined's: dz · exp(m − peak), in the dim `as`.",
    operands=takes("dz", "m", "peak"),
    attributes=(SHARES,),
    typing=_rejoined_dz,
)


def class_dims(op: Op, types: Sequence[Type]) -> tuple[str, ...]:
    """The dim of a loss' classes, if an op takes logits, or makes them of its operands."""
    match op.kind:
        case "cross_entropy" | "softmax_parts":
            return types[0].dims[-1:]
        case "linear_cross_entropy" | "linear_parts":
            return (classes_of(op, types[1]),)
        case _:
            return ()
