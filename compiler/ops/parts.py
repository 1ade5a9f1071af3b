"""Cross entropy where ranks share the vocabulary out, in one pass over the logits: what each has of its own classes.

These are the largest logit m, a sum of exponents z that is relative to it, and so one for each rank, and what its
classes have of the labels' logits, t.  `rejoined` brings them to what `softmax_parts` gives, once the ranks know the
largest of all.  Logits are there, or they are made of a product, in chunks of classes, and again for their gradient
(`scalec.runtime.kernels`, whose `linear_cross_entropy` says what that costs).
Non-goals: where these ops stand (`passes.fuse_ops`).
"""

from collections.abc import Sequence

from ..ir import MAXIMUM, PARTIAL, Op, Placement, Program, Type, sharded
from .algebra import CONTRACT
from .logits import INNER, check, chunk, classes_of, tokens_of
from .loss import CAP, SMOOTHING, in_pass, wide
from .protocol import Attribute, Builder, OpDef, TypingError, is_pending, takes
from .saved import Local, Saved

SHARES = Attribute("as", kinds=(str,))


def _parts(program: Program, logits: Type, labels: Type, op: Op) -> list[Type]:
    """m, z and t of logits."""
    *tokens, classes = logits.dims
    shares = str(op.get("as"))
    if is_pending(logits):
        raise TypingError(f"{op.kind} is not linear in what is partial")
    if any(labels.axes_of(dim) != logits.axes_of(dim) for dim in tokens):
        raise TypingError(f"{op.kind} takes the labels of the tokens that a rank has")
    axes = logits.axes_of(classes)
    if not axes or program.size(shares) != program.degree(axes):
        raise TypingError(f"{op.kind} gives one share for each rank over which {classes} lies")

    def placed(dims: Sequence[str], of_classes: Placement) -> Type:
        return Type(wide(logits.dtype), tuple(dims), moved(program, logits, axes, of_classes))

    return [placed(tokens, MAXIMUM), placed([*tokens, shares], sharded(shares)), placed(tokens, PARTIAL)]


def moved(program: Program, type: Type, axes: Sequence[str], to: Placement) -> tuple[tuple[str, Placement], ...]:
    """The placements of a type, but on these axes."""
    return program.places(dict(type.places) | dict.fromkeys(axes, to))


def _check_gradients(op: Op, dz: Type, dt: Type, m: Type) -> None:
    if dt.dims != m.dims or dz.dims != (*m.dims, str(op.get("as"))):
        raise TypingError(f"{op.kind} takes gradients of z and t")


def _saves(it: Local) -> Saved:
    """All operands, and m."""
    return Saved(operands=tuple(range(len(it.types))), results=(0,))


# ---- of logits that are there


def _logit_parts(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    logits, labels = types
    if not logits.dims or logits.dims[:-1] != labels.dims:
        raise TypingError(f"{op.kind} takes logits of dims [{', '.join(labels.dims)}, classes]")
    return _parts(program, logits, labels, op)


def _logit_parts_dx(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    dz, dt, m, logits, _ = types
    _check_gradients(op, dz, dt, m)
    return [logits]


def _logit_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    """m is taken as constant: its gradients through z, and through what `rejoined` makes of it, cancel."""
    (_, dz, dt), m = grads, op.outputs[0].name
    back = [dz, dt, b.saved(m), *map(b.saved, op.inputs)]
    return [b.emit(LOGIT_PARTS_DX.name, back, op.inputs[:1], **dict(op.attrs))[0], None]


def _pass(it: Local) -> int:
    return in_pass(it, 0)


def _pass_back(it: Local) -> int:
    return in_pass(it, 3)


# ---- of a product


def _logits(program: Program, x: Type, weight: Type, op: Op) -> Type:
    return _product(program, x, weight, op.names("inner"), op)


def _product(program: Program, x: Type, weight: Type, over: tuple[str, ...], op: Op) -> Type:
    single = Op(CONTRACT.name, (), (), (("over", over),), span=op.span)
    return CONTRACT.infer(program, (x, weight), single)[0]


def _linear_parts(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    x, weight, labels = types
    check(op, x, weight, labels)
    return _parts(program, _logits(program, x, weight, op), labels, op)


def _linear_parts_dx(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    """As the product of the logits' gradient with the weight."""
    dz, dt, m, x, weight, *_ = types
    _check_gradients(op, dz, dt, m)
    return [_product(program, _logits(program, x, weight, op), weight, (classes_of(op, weight),), op)]


def _linear_parts_dw(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    """As the product of the logits' gradient with the operand."""
    dz, dt, m, x, weight, *_ = types
    _check_gradients(op, dz, dt, m)
    return [_product(program, _logits(program, x, weight, op), x, tokens_of(op, x), op)]


def _linear_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    """m is taken as constant, as that of logits."""
    x, weight, _ = op.inputs
    (_, dz, dt), m = grads, op.outputs[0].name
    back, attrs = [dz, dt, b.saved(m), *map(b.saved, op.inputs)], dict(op.attrs)
    dx = b.emit(LINEAR_PARTS_DX.name, back, [x], **attrs)[0] if b.wanted(x) else None
    dw = b.emit(LINEAR_PARTS_DW.name, back, [weight], **attrs)[0] if b.wanted(weight) else None
    return [dx, dw, None]


def _chunk(it: Local) -> int:
    return sum(chunk(it, 0, by_tokens=False))


def _sum_of_chunks(it: Local) -> int:
    """The gradient of x adds up in float32, each part rounded first; that of the weight is made beside it."""
    x, weight = 3, 4
    (logits, terms), narrow = chunk(it, x, by_tokens=False), it.bytes(x) < it.widened(x)
    part = it.bytes(x) if narrow else 0
    total = it.widened(x) + it.bytes(weight) + logits + max(terms, part)
    return total - it.bytes(x)


# ---- the entries

OF_LOGITS = (
    "m, the largest; z = Σ exp(logit − m), one for each rank, in the dim `as`; t, the label's logit, or 0 for a label"
    " elsewhere, with smoothing as softmax_parts'."
)

LOGIT_PARTS = OpDef(
    "logit_parts",
    f"Of this rank's classes, with logits cap · tanh(logit / cap), as they are where cap is 0: {OF_LOGITS}",
    operands=takes("logits", "labels"),
    attributes=(SMOOTHING, CAP, SHARES),
    typing=_logit_parts,
    adjoint=_logit_adjoint,
    function="logit_parts",
    saves=_saves,
    scratch=_pass,
)
LOGIT_PARTS_DX = OpDef(
    "logit_parts_dx",
    "The logits' gradient from those of z and t; m is taken as constant.",
    operands=takes("dz", "dt", "m", "logits", "labels"),
    attributes=LOGIT_PARTS.attributes,
    typing=_logit_parts_dx,
    scratch=_pass_back,
)

LINEAR_PARTS = OpDef(
    "linear_parts",
    f"Of this rank's classes, with logits as linear_cross_entropy's: {OF_LOGITS}",
    operands=takes("x", "w", "labels"),
    attributes=(INNER, *LOGIT_PARTS.attributes),
    typing=_linear_parts,
    adjoint=_linear_adjoint,
    function="linear_parts",
    saves=_saves,
    scratch=_chunk,
)
LINEAR_PARTS_DX = OpDef(
    "linear_parts_dx",
    "The gradient of linear_parts' operand from those of z and t; m is taken as constant.",
    operands=takes("dz", "dt", "m", "x", "w", "labels"),
    attributes=LINEAR_PARTS.attributes,
    typing=_linear_parts_dx,
    scratch=_sum_of_chunks,
)
LINEAR_PARTS_DW = OpDef(
    "linear_parts_dw",
    "The gradient of its weight.",
    operands=LINEAR_PARTS_DX.operands,
    attributes=LINEAR_PARTS.attributes,
    typing=_linear_parts_dw,
)
