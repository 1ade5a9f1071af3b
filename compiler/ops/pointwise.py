"""Nonlinear functions of one operand, elementwise."""

from collections.abc import Sequence

from ..ir import Op, Type
from .protocol import Builder, OpDef, Operand, Shape, takes


def same(types: Sequence[Type], op: Op) -> list[Shape]:
    """The first operand's element type and dims."""
    return [(types[0].dtype, types[0].dims)]


def _silu_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    return [b.emit("silu_dx", [grads[0], b.saved(op.inputs[0])], op.inputs)[0]]


SILU = OpDef(
    "silu",
    "x · sigmoid(x) (Hendrycks and Gimpel 2016).",
    same,
    operands=(Operand("x"),),
    adjoint=_silu_adjoint,
    function="silu",
    surface=True,
)

SILU_DX = OpDef(
    "silu_dx",
    "The gradient of silu's operand: dy · silu'(x).",
    same,
    operands=takes("dy", "x"),
    linear=((0,),),
)
