"""Sums, means and softmax over named dims.

A sum or a mean over a sharded dim is a sum over ranks still to be done; a mean divides by global sizes, so it needs no
other rule.  Non-goals: softmax over a sharded dim.
"""

from collections.abc import Sequence

from ..ir import REPLICATED, Op, Placement, Program, Type
from ..ir.placements import dual
from .pointwise import same
from .protocol import FUNCTIONAL, RUNTIME, TORCH, Attribute, Builder, OpDef, Operand, Shape, TypingError, takes
from .saved_tensors import result

OVER = Attribute("over", dims="own")


def _reduced(types: Sequence[Type], op: Op) -> list[Shape]:
    (x,), over = types, op.names("over")
    if not over or len({*over}) < len(over):
        raise TypingError(f"{op.kind} goes over dims, each named once")
    return [(x.dtype, tuple(dim for dim in x.dims if dim not in over))]


def _reduction_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    return [b.emit(f"{op.kind}_dx", [grads[0], b.like(op.inputs[0])], op.inputs)[0]]


def _spread(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    """Placed as the gradient of x, of which dy is that of a reduction."""
    dy, x = types
    if dy.dims != tuple(dim for dim in x.dims if dim in dy.dims):
        raise TypingError(f"{op.kind} takes the gradient of a reduction of [{', '.join(x.dims)}]")
    at: dict[str, Placement] = {}
    for axis in (axis.name for axis in program.axes):
        place = dual(x.at(axis))
        if dy.at(axis) != (REPLICATED if place.dim and place.dim not in dy.dims else place):
            raise TypingError(f"{op.kind} cannot take {dy.at(axis)} of {x.at(axis)} on {axis}")
        at[axis] = place
    return [Type(dy.dtype, x.dims, program.places(at))]


def _reduction(name: str, doc: str, module: str) -> OpDef:
    return OpDef(
        name,
        doc,
        _reduced,
        operands=(Operand("x"),),
        attributes=(OVER,),
        linear=((0,),),
        adjoint=_reduction_adjoint,
        function=name,
        module=module,
        surface=True,
    )


def _reduction_dx(name: str) -> OpDef:
    return OpDef(
        f"{name}_dx",
        f"The gradient of {name}'s operand: dy, repeated; x itself gives only its shape.",
        operands=takes("dy", "x"),
        typing=_spread,
    )


SUM = _reduction("sum", "The sum over the dims `over`; also the gradient of a broadcast.", TORCH)
SUM_DX = _reduction_dx("sum")

MEAN = _reduction("mean", "The sum over the dims `over`, divided by the product of their global sizes.", RUNTIME)
MEAN_DX = _reduction_dx("mean")


def _normalised(types: Sequence[Type], op: Op) -> list[Shape]:
    over = op.names("over")
    if len(over) != 1 or over == ("batch",):
        raise TypingError("softmax goes over one dim, which is not batch")
    return same(types, op)


def _over(types: Sequence[Type], op: Op) -> frozenset[str]:
    return frozenset(op.names("over"))


def _softmax_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    y = b.saved(op.outputs[0].name)
    return [b.emit("softmax_dx", [grads[0], y], op.inputs, over=op.names("over"))[0]]


SOFTMAX = OpDef(
    "softmax",
    "exp(x) / Σ exp(x), the sum over the dim `over`.",
    _normalised,
    operands=(Operand("x"),),
    attributes=(Attribute("over", dims="last"),),
    whole=_over,
    adjoint=_softmax_adjoint,
    function="softmax",
    module=FUNCTIONAL,
    stem="p",
    saves=result,
    surface=True,
)

SOFTMAX_DX = OpDef(
    "softmax_dx",
    "The gradient of softmax's operand, of its result y: y · (dy − Σ dy · y).",
    _normalised,
    operands=takes("dy", "y"),
    attributes=SOFTMAX.attributes,
    linear=((0,),),
    whole=_over,
)
