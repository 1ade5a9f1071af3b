"""Sums, products and matrix products: the ops that gradients are made of too."""

from collections.abc import Sequence

from ..ir import BATCH, FLOATS, Op, Type
from .line import Formula, Line
from .pointwise import same
from .protocol import ALL, FUNCTIONAL, Attribute, Builder, OpDef, Shape, TypingError, takes
from .saved_tensors import Saved, factors
from .work import product


def _same_numbers(types: Sequence[Type], op: Op) -> None:
    dtypes = [type.dtype for type in types]
    if len({*dtypes}) != 1 or dtypes[0] not in FLOATS:
        raise TypingError(f"{op.kind} takes numbers of one element type, not {', '.join(dtypes)}")


def _widest_shape(types: Sequence[Type], op: Op) -> list[Shape]:
    """The dims of the widest operand, which has all dims of the others in its order."""
    _same_numbers(types, op)
    widest = max(types, key=lambda type: len(type.dims))
    for type in types:
        if type.dims != tuple(dim for dim in widest.dims if dim in type.dims):
            raise TypingError(
                f"[{', '.join(type.dims)}] are not dims of [{', '.join(widest.dims)}] in that order"
            )
    return [(widest.dtype, widest.dims)]


def _contraction_shape(types: Sequence[Type], op: Op) -> list[Shape]:
    """The dims of both operands, in order, without the dims that are summed over."""
    _same_numbers(types, op)
    over, (x, w) = op.names("over"), types
    left = [dim for dim in x.dims if dim not in over]
    right = [dim for dim in w.dims if dim not in over]
    for dim in left:
        if dim in right:
            raise TypingError(f"{dim} is in both operands of a product but not summed over")
    return [(x.dtype, (*left, *right))]


def sums_over_batch(op: Op) -> bool:
    """Whether a product is the gradient of a weight."""
    return BATCH in op.names("over")


def sum_to_operand(grad: str, name: str, full: Sequence[str], b: Builder) -> str:
    """The gradient of an operand that was broadcast to the dims `full`: summed over the dims that
    the operand lacks.
    """
    over = tuple(dim for dim in full if dim not in b.type(name).dims)
    return b.emit("sum", [grad], [name], over=over)[0] if over else grad


def _add_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    (grad,), full = grads, op.outputs[0].type.dims
    terms: list[str | None] = []
    for name in op.inputs:
        terms.append(sum_to_operand(grad, name, full, b) if b.is_wanted(name) else None)
    return terms


def _mul_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    (grad,), (x, y), full = grads, op.inputs, op.outputs[0].type.dims

    def gradient(factor: str, other: str) -> str | None:
        if not b.is_wanted(factor):
            return None
        (product,) = b.emit("mul", [grad, b.save(other)], [factor])
        return sum_to_operand(product, factor, full, b)

    return [gradient(x, y), gradient(y, x)]


def _div_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    """y = x / z: dx = dy / z, dz = -dy · y / z."""
    (grad,), (x, z), full = grads, op.inputs, op.outputs[0].type.dims
    (over,) = b.emit("div", [grad, b.save(z)], [x])
    dx = sum_to_operand(over, x, full, b) if b.is_wanted(x) else None
    if not b.is_wanted(z):
        return [dx, None]
    (product,) = b.emit("mul", [over, b.save(op.outputs[0].name)], [z])
    (negative,) = b.emit("scale", [product], [z], by=-1.0)
    return [dx, sum_to_operand(negative, z, full, b)]


def _contract_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    """y = x·w: the input's gradient is dy·w over w's own dims, the weight's is dy·x over x's
    own dims.
    """
    (grad,), (x, w), summed = grads, op.inputs, op.names("over")

    def gradient(factor: str, other: str) -> str | None:
        if not b.is_wanted(factor):
            return None
        outer = tuple(dim for dim in b.type(other).dims if dim not in summed)
        return b.emit("contract", [grad, b.save(other)], [factor], over=outer)[0]

    return [gradient(x, w), gradient(w, x)]


ADD = OpDef(
    "add",
    "The sum of any number of operands; operands of fewer dims are broadcast.",
    _widest_shape,
    operands=takes("x"),
    variadic=True,
    linear=((ALL,),),
    adjoint=_add_adjoint,
    stem="y",
)

MUL = OpDef(
    "mul",
    "The elementwise product of two operands.",
    _widest_shape,
    operands=takes("x", "y"),
    linear=((0,), (1,)),
    adjoint=_mul_adjoint,
    line=lambda program, op: Line(Formula("{x} * {y}", lambda x, y: x * y)),
    stem="g",
    saves=factors,
)

DIV = OpDef(
    "div",
    "The elementwise quotient x / y.",
    _widest_shape,
    operands=takes("x", "y"),
    linear=((0,),),
    adjoint=_div_adjoint,
    stem="y",
    saves=lambda local: Saved(operands=(1, 0) if local.wanted[1] else (1,)),
)

SCALE = OpDef(
    "scale",
    "The product with the number `by`.",
    same,
    operands=takes("x"),
    attributes=(Attribute("by"),),
    linear=((0,),),
    adjoint=lambda op, grads, b: b.emit("scale", grads, op.inputs, by=op.get("by")),
    stem="y",
)

SHIFT = OpDef(
    "shift",
    "The sum with the number `by`.",
    same,
    operands=takes("x"),
    attributes=(Attribute("by"),),
    adjoint=lambda op, grads, b: grads,
    stem="y",
)

CONTRACT = OpDef(
    "contract",
    "The product x·w summed over the dims `over`; written `x @ w[over -> …]`.",
    _contraction_shape,
    operands=takes("x", "w"),
    attributes=(Attribute("over", kinds=(tuple,)),),
    linear=((0,), (1,)),
    adjoint=_contract_adjoint,
    may_delay=sums_over_batch,
    function="linear",
    torch="linear",
    module=FUNCTIONAL,
    stem="y",
    saves=factors,
    work=product,
)
