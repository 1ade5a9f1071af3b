"""Tensors concatenated along their last dims, which together are a dim of their own; and the
inverse.
"""

from collections.abc import Mapping, Sequence

from ..ir import DATA_DIMS, Op, Type
from .algebra import sum_to_operand
from .call import Call, Size
from .protocol import ALL, Attribute, Builder, Dims, Joins, OpDef, Operand, Shape, TypingError
from .saved_tensors import is_view


def _concat_shape(types: Sequence[Type], op: Op) -> list[Shape]:
    dim, dtype = str(op.get("as")), types[0].dtype
    before = max((type.dims[:-1] for type in types), key=len)
    for type in types:
        dims = tuple(dim for dim in before if dim in type.dims[:-1])
        if not type.dims or type.dtype != dtype or type.dims[:-1] != dims:
            raise TypingError(
                "concat takes operands of the same dims, or of some of them, but for their last"
                " dims"
            )
    if {dim, *_lasts(types)} & {*DATA_DIMS, *before}:
        raise TypingError("concat joins dims of the model, to one that its operands lack")
    return [(dtype, (*before, dim))]


def _lasts(types: Sequence[Type]) -> tuple[str, ...]:
    lasts: list[str] = []
    for type in types:
        lasts += type.dims[-1:]
    return tuple(lasts)


def _sum_of_lasts(types: Sequence[Type], op: Op) -> Mapping[str, tuple[str, ...]]:
    return {str(op.get("as")): _lasts(types)}


def _adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    """The parts of the gradient, each summed over the dims that its operand is repeated over."""
    *before, _ = op.outputs[0].type.dims
    lasts = _lasts([b.type(name) for name in op.inputs])
    parts = b.emit("split", grads, op.inputs, parts=lasts)
    return [
        sum_to_operand(part, name, before, b) for part, name in zip(parts, op.inputs, strict=True)
    ]


def _split_shape(types: Sequence[Type], op: Op) -> list[Shape]:
    (x,), parts = types, op.names("parts")
    if not x.dims or {x.dims[-1], *parts} & {*DATA_DIMS, *x.dims[:-1]}:
        raise TypingError("split divides a dim of the model, into ones that its operand lacks")
    return [(x.dtype, (*x.dims[:-1], part)) for part in parts]


def _sum_of_parts(types: Sequence[Type], op: Op) -> Mapping[str, tuple[str, ...]]:
    return {types[0].dims[-1]: op.names("parts")}


def _all_of(joins: Joins) -> Dims:
    """The dims that are made up of others, and the dims that make them up."""

    def dims(types: Sequence[Type], op: Op) -> frozenset[str]:
        names: set[str] = set()
        for dim, parts in joins(types, op).items():
            names.update((dim, *parts))
        return frozenset(names)

    return dims


CONCAT = OpDef(
    "concat",
    "The operands concatenated along their last dims, which together are the dim `as`.  One"
    " that lacks other dims is"
    " repeated over them.  A single operand is itself, by another name of its last dim.",
    _concat_shape,
    operands=(Operand("x"),),
    attributes=(Attribute("as", dims="any"),),
    variadic=True,
    linear=((ALL,),),
    unsharded_dims=_all_of(_sum_of_lasts),
    joins=_sum_of_lasts,
    adjoint=_adjoint,
    function="concat",
    torch="concat",
    call=lambda local: Call(),  # the dim's name is the IR's alone
    user_visible=True,
)

SPLIT = OpDef(
    "split",
    "Consecutive slices of the last dim, which the dims `parts` make up: as many results.",
    _split_shape,
    operands=(Operand("x"),),
    attributes=(Attribute("parts", dims="several"),),
    linear=((0,),),
    unsharded_dims=_all_of(_sum_of_parts),
    joins=_sum_of_parts,
    adjoint=lambda op, grads, b: b.emit(
        "concat", grads, op.inputs, **{"as": b.type(op.inputs[0]).dims[-1]}
    ),
    function="split",
    torch="split",
    call=lambda local: Call(tuple(map(Size, local.op.names("parts")))),
    views=is_view,
    user_visible=True,
)
