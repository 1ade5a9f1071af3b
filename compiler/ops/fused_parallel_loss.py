"""Cross entropy where ranks share the vocabulary out, in one pass over the logits: what each has of its own classes.

These are the largest logit m, a sum of exponents z that is relative to it, and so one for each rank, and what its
classes have of the labels' logits, t.  `rescale_to_global_max` brings them to what `local_softmax_stats` gives, once
the ranks know the largest of all.  Logits are there, or they are made of a product, in chunks of classes, and again for
their gradient (`scalec.runtime.kernels`, whose `linear_cross_entropy` says what that costs). Non-goals: where these ops
stand (`passes.fuse_ops`).
"""

from collections.abc import Sequence

from ..ir import MAXIMUM, PARTIAL, Op, Placement, Program, Type, sharded
from .algebra import ADD, CONTRACT
from .chunked_logits import INNER, PRODUCT, check, chunk, classes_of, gradients, tokens_of
from .loss import CAP, SMOOTHING, in_pass, wide
from .protocol import Attribute, Builder, OpDef, TypingError, is_pending, takes
from .reduce import SUM
from .saved_tensors import Local, Saved

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


def _logit_softmax_stats(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    logits, labels = types
    if not logits.dims or logits.dims[:-1] != labels.dims:
        raise TypingError(f"{op.kind} takes logits of dims [{', '.join(labels.dims)}, classes]")
    return _parts(program, logits, labels, op)


def _logit_softmax_stats_dx(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    dz, dt, m, logits, _ = types
    _check_gradients(op, dz, dt, m)
    return [logits]


def _logit_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    """m is taken as constant: its gradients through z, and through what `rescale_to_global_max` makes of it, cancel."""
    (_, dz, dt), m = grads, op.outputs[0].name
    back = [dz, dt, b.saved(m), *map(b.saved, op.inputs)]
    return [b.emit(LOGIT_PARTS_DX.name, back, op.inputs[:1], **dict(op.attrs))[0], None]


def _pass(it: Local) -> int:
    return in_pass(it, 0)


def _pass_back(it: Local) -> int:
    return in_pass(it, 3)


# ---- of a product


def _by(entry: OpDef, program: Program, types: Sequence[Type], op: Op, *over: str) -> Type:
    """What an op of this entry would give of these, which goes over some dims, or adds them."""
    attrs = (("over", over),) if over else ()
    return entry.infer(program, types, Op(entry.name, (), (), attrs, span=op.span))[0]


def _logits(program: Program, op: Op, x: Type, weight: Type, labels: Type, *bias: Type) -> Type:
    product = _by(CONTRACT, program, (x, weight), op, *op.names("inner"))
    return _by(ADD, program, (product, *bias), op) if bias else product


def _linear_softmax_stats(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    check(op, *types)
    return _parts(program, _logits(program, op, *types), types[2], op)


def _gradient_of_logits(program: Program, types: Sequence[Type], op: Op) -> Type:
    """Placed as they are."""
    dz, dt, m, *product = types
    _check_gradients(op, dz, dt, m)
    return _logits(program, op, *product)


def _linear_softmax_stats_dx(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    """As the product of the logits' gradient with the weight."""
    weight = types[4]
    return [_by(CONTRACT, program, (_gradient_of_logits(program, types, op), weight), op, classes_of(op, weight))]


def _linear_softmax_stats_dw(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    """As the product of the logits' gradient with the operand."""
    x = types[3]
    return [_by(CONTRACT, program, (_gradient_of_logits(program, types, op), x), op, *tokens_of(op, x))]


def _linear_softmax_stats_db(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    """As the sum of the logits' gradient."""
    return [_by(SUM, program, (_gradient_of_logits(program, types, op),), op, *tokens_of(op, types[3]))]


def _linear_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    """m is taken as constant, as that of logits."""
    (_, dz, dt), m = grads, op.outputs[0].name
    return gradients(op, [dz, dt, b.saved(m), *map(b.saved, op.inputs)], LINEAR_PARTS_GRADIENTS, b)


def _chunk(it: Local) -> int:
    return sum(chunk(it, 0, by_tokens=False))


def _sum_of_chunks(it: Local) -> int:
    """The gradient of x adds up in float32, each part rounded first; those of weight and bias are made beside it."""
    x, weights = 3, (4, *range(6, len(it.types)))
    (logits, terms), narrow = chunk(it, x, by_tokens=False), it.bytes(x) < it.widened(x)
    part = it.bytes(x) if narrow else 0
    total = it.widened(x) + sum(map(it.bytes, weights)) + logits + max(terms, part)
    return total - it.bytes(x)


# ---- the entries

OF_LOGITS = (
    "m, the largest; z = Σ exp(logit − m), one for each rank, in the dim `as`; t, the label's logit, or 0 for a label"
    " elsewhere, with smoothing as local_softmax_stats'."
)

LOGIT_PARTS = OpDef(
    "logit_softmax_stats",
    f"Of this rank's classes, with logits cap · tanh(logit / cap), as they are where cap is 0: {OF_LOGITS}",
    operands=takes("logits", "labels"),
    attributes=(SMOOTHING, CAP, SHARES),
    typing=_logit_softmax_stats,
    adjoint=_logit_adjoint,
    function="logit_softmax_stats",
    saves=_saves,
    scratch=_pass,
)
LOGIT_PARTS_DX = OpDef(
    "logit_softmax_stats_dx",
    "The logits' gradient from those of z and t; m is taken as constant.",
    operands=takes("dz", "dt", "m", "logits", "labels"),
    attributes=LOGIT_PARTS.attributes,
    typing=_logit_softmax_stats_dx,
    scratch=_pass_back,
)

LINEAR_PARTS = OpDef(
    "linear_softmax_stats",
    f"Of this rank's classes, with logits as linear_cross_entropy's: {OF_LOGITS}",
    operands=PRODUCT,
    attributes=(INNER, *LOGIT_PARTS.attributes),
    typing=_linear_softmax_stats,
    adjoint=_linear_adjoint,
    function="linear_softmax_stats",
    saves=_saves,
    scratch=_chunk,
)
LINEAR_PARTS_DX = OpDef(
    "linear_softmax_stats_dx",
    "The gradient of linear_softmax_stats' operand from those of z and t; m is taken as constant.",
    operands=(*takes("dz", "dt", "m"), *PRODUCT),
    attributes=LINEAR_PARTS.attributes,
    typing=_linear_softmax_stats_dx,
    scratch=_sum_of_chunks,
)
LINEAR_PARTS_DW = OpDef(
    "linear_softmax_stats_dw",
    "The gradient of its weight.",
    operands=LINEAR_PARTS_DX.operands,
    attributes=LINEAR_PARTS.attributes,
    typing=_linear_softmax_stats_dw,
)
LINEAR_PARTS_DB = OpDef(
    "linear_softmax_stats_db",
    "The gradient of its bias.",
    operands=LINEAR_PARTS_DX.operands,
    attributes=LINEAR_PARTS.attributes,
    typing=_linear_softmax_stats_db,
)
LINEAR_PARTS_GRADIENTS = {LINEAR_PARTS_DX.name: 0, LINEAR_PARTS_DW.name: 1, LINEAR_PARTS_DB.name: 3}
"""The ops that give gradients, and of which operand."""
