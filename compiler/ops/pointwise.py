"""Nonlinear functions of one operand, elementwise: each with the op that its gradient is made of."""

from collections.abc import Sequence

from ..ir import Op, Type
from .protocol import Attribute, Builder, OpDef, Operand, Shape, takes
from .saved_tensors import Local, Saved, Saves, operand, result


def same(types: Sequence[Type], op: Op) -> list[Shape]:
    """The first operand's element type and dims."""
    return [(types[0].dtype, types[0].dims)]


def _adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    return [b.emit(f"{op.kind}_dx", [grads[0], b.saved(op.inputs[0])], op.inputs, **dict(op.attrs))[0]]


def _inner_tanh(it: Local) -> Saved:
    return Saved(others=(("tanh", it.bytes()),))


def _function(name: str, doc: str, saves: Saves, *attributes: Attribute) -> OpDef:
    return OpDef(
        name,
        doc,
        same,
        operands=(Operand("x"),),
        attributes=attributes,
        adjoint=_adjoint,
        function=name,
        saves=saves,
        surface=True,
    )


def _slope(entry: OpDef) -> OpDef:
    """The gradient of such a function's operand."""
    return OpDef(
        f"{entry.name}_dx",
        f"The gradient of {entry.name}'s operand: dy times the slope at x.",
        same,
        operands=takes("dy", "x"),
        attributes=entry.attributes,
        linear=((0,),),
    )


FUNCTIONS = (
    _function("exp", "e^x.", result),
    _function(
        "gelu",
        "x · Φ(x), Φ the normal distribution's, or its approximation by tanh (Hendrycks and Gimpel 2016).",
        operand,
        Attribute("approximate", choices=("none", "tanh"), default="none"),
    ),
    _function("relu", "max(x, 0) (Nair and Hinton 2010).", result),
    _function("sigmoid", "1 / (1 + e^-x).", result),
    _function("silu", "x · sigmoid(x) (Hendrycks and Gimpel 2016).", operand),
    _function("softcap", "cap · tanh(x / cap) (Gemma Team 2024).", _inner_tanh, Attribute("cap")),
    _function("tanh", "The hyperbolic tangent.", result),
)
SLOPES = tuple(map(_slope, FUNCTIONS))
