"""Cross entropy, summed over tokens; over a sharded vocabulary as a maximum and two sums (Shoeybi et al. 2019, 3).

No rank ever holds all logits.  The loss is a sum: the division by the step's count of valid tokens belongs to the step.
"""

from collections.abc import Callable, Sequence

from ..ir import MAXIMUM, Op, Type, Value
from .protocol import Builder, OpDef, Operand, Shape, TypingError, takes


def wide(dtype: str) -> str:
    """The element type in which losses are summed: f64 for f64, else f32."""
    return "f64" if dtype == "f64" else "f32"


def _total(types: Sequence[Type], op: Op) -> list[Shape]:
    return [(wide(types[0].dtype), ())]


def _token_total(types: Sequence[Type], op: Op) -> list[Shape]:
    logits, labels = types
    if not logits.dims or logits.dims[:-1] != labels.dims:
        raise TypingError(f"cross_entropy takes logits of dims [{', '.join(labels.dims)}, classes]")
    return _total(types, op)


def _per_token(types: Sequence[Type], op: Op) -> list[Shape]:
    return [(wide(types[0].dtype), types[0].dims[:-1])]


def _two_per_token(types: Sequence[Type], op: Op) -> list[Shape]:
    return _per_token(types, op) * 2


def _like_logits(types: Sequence[Type], op: Op) -> list[Shape]:
    logits = next(t for t in types[1:] if t.dims)
    return [(logits.dtype, logits.dims)]


def _like_parts(types: Sequence[Type], op: Op) -> list[Shape]:
    return [(types[1].dtype, types[1].dims)] * 2


def _parts_grad(types: Sequence[Type], op: Op) -> list[Shape]:
    return [(types[2].dtype, types[2].dims)]


def _cross_entropy_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    logits, labels = op.inputs
    return [b.emit("cross_entropy_dx", [*grads, b.saved(logits), b.saved(labels)], [logits])[0], None]


def _parts_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    saved = [b.saved(name) for name in op.inputs]
    return [b.emit("softmax_parts_dx", [*grads, *saved], op.inputs[:1])[0], None, None]


def _token_loss_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    z, target, labels = op.inputs
    return [*b.emit("token_loss_dx", [*grads, b.saved(z), b.saved(labels)], [z, target]), None]


def _classes(types: Sequence[Type], op: Op) -> frozenset[str]:
    """The dim that has to be whole, unless the op is expanded."""
    logits = next(t for t in types if t.dims)
    return frozenset(logits.dims[-1:])


def _expand(op: Op, fresh: Callable[[str], str], type_of: Callable[[str], Type]) -> list[Op]:
    """max_logit and softmax_parts work on the classes too; token_loss has none, and is invariant there."""
    (logits, labels), (loss,) = op.inputs, op.outputs
    classes = type_of(logits).dims[-1]
    work = (("work", op.names("work")),)
    rest = (("work", tuple(item for item in op.names("work") if not item.endswith(f":{classes}"))),)
    token = Type(loss.type.dtype, type_of(logits).dims[:-1])
    m, z, t = (Value(fresh(name), token) for name in ("peak", "z", "t"))
    return [
        Op("max_logit", (logits,), (m,), work, span=op.span),
        Op("softmax_parts", (logits, m.name, labels), (z, t), work, span=op.span),
        Op("token_loss", (z.name, t.name, labels), (loss,), rest, span=op.span),
    ]


CROSS_ENTROPY = OpDef(
    "cross_entropy",
    "The sum over tokens of log Σ exp(logits) − logits[label]; a negative label counts nothing.",
    _token_total,
    operands=(Operand("logits"), Operand("labels", given="labels")),
    adjoint=_cross_entropy_adjoint,
    whole=_classes,
    expand=_expand,
    function="cross_entropy",
    surface=True,
)

CROSS_ENTROPY_DX = OpDef(
    "cross_entropy_dx",
    "The logits' gradient: softmax less one at the label.",
    _like_logits,
    operands=takes("dy", "logits", "labels"),
    linear=((0,),),
    whole=_classes,
)

MAX_LOGIT = OpDef(
    "max_logit",
    "The largest logit; no gradient, since the loss does not depend on it.",
    _per_token,
    operands=takes("logits"),
    contracts=MAXIMUM,
    function="max_logit",
)

SOFTMAX_PARTS = OpDef(
    "softmax_parts",
    "Of this rank's classes: z = Σ exp(logits − peak), and t = logits[label] − peak, or 0 for a label elsewhere.",
    _two_per_token,
    operands=takes("logits", "peak", "labels"),
    adjoint=_parts_adjoint,
    function="softmax_parts",
)

SOFTMAX_PARTS_DX = OpDef(
    "softmax_parts_dx",
    "The logits' gradient: dz · exp(logits − peak), plus dt at the label.",
    _parts_grad,
    operands=takes("dz", "dt", "logits", "peak", "labels"),
    linear=((0, 1),),
)

TOKEN_LOSS = OpDef(
    "token_loss",
    "The sum over tokens with a label of log z − t.",
    _total,
    operands=takes("z", "t", "labels"),
    adjoint=_token_loss_adjoint,
    function="token_loss",
)

TOKEN_LOSS_DX = OpDef(
    "token_loss_dx",
    "The gradients of z and t.",
    _like_parts,
    operands=takes("dy", "z", "labels"),
    linear=((0,),),
)
