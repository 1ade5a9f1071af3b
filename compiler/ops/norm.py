"""Normalisation over the trailing dims."""

from collections.abc import Sequence

from ..ir import Op, Type
from .pointwise import same
from .protocol import Attribute, Builder, OpDef, Operand, Shape, TypingError, takes


def _normed(types: Sequence[Type], op: Op) -> list[Shape]:
    x, weight = types
    if x.dims[-len(weight.dims) :] != weight.dims:
        raise TypingError(
            f"rmsnorm normalises the last dims, but [{', '.join(x.dims)}] does not end in those of its weight"
        )
    return [(x.dtype, x.dims)]


def _weight_dims(types: Sequence[Type], op: Op) -> frozenset[str]:
    return frozenset(types[1].dims)


def _adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    (dy,), (x, weight), eps = grads, op.inputs, op.get("eps")
    dx = b.emit("rmsnorm_dx", [dy, b.saved(weight), b.saved(x)], [x], eps=eps)[0] if b.wanted(x) else None
    dw = b.emit("rmsnorm_dw", [dy, b.saved(weight), b.saved(x)], [weight], eps=eps)[0] if b.wanted(weight) else None
    return [dx, dw]


def _like_weight(types: Sequence[Type], op: Op) -> list[Shape]:
    return [(types[1].dtype, types[1].dims)]


RMSNORM = OpDef(
    "rmsnorm",
    "x · weight / sqrt(mean(x²) + eps), the mean over the weight's dims (Zhang and Sennrich 2019).",
    _normed,
    operands=(Operand("x"), Operand("weight", init="ones")),
    attributes=(Attribute("eps"),),
    whole=_weight_dims,
    adjoint=_adjoint,
    function="rms_norm",
    surface=True,
)

RMSNORM_DX = OpDef(
    "rmsnorm_dx",
    "The gradient of rmsnorm's operand.",
    same,
    operands=takes("dy", "weight", "x"),
    attributes=RMSNORM.attributes,
    linear=((0,),),
    whole=_weight_dims,
)

RMSNORM_DW = OpDef(
    "rmsnorm_dw",
    "The gradient of rmsnorm's weight.",
    _like_weight,
    operands=takes("dy", "weight", "x"),
    attributes=RMSNORM.attributes,
    linear=((0,),),
    whole=_weight_dims,
)
