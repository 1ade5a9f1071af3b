"""Tensors one behind the other along their last dims, which together are a dim of its own."""

from collections.abc import Mapping, Sequence

from ..ir import DATA_DIMS, Op, Type
from .protocol import ALL, Attribute, Builder, OpDef, Operand, Shape, TypingError, takes


def _joined(types: Sequence[Type], op: Op) -> list[Shape]:
    dim, (dtype, *_), (before, *_) = str(op.get("as")), [t.dtype for t in types], [t.dims[:-1] for t in types]
    if len(types) < 2 or any(not t.dims or t.dtype != dtype or t.dims[:-1] != before for t in types):
        raise TypingError("concat takes several operands, alike but for their last dims")
    if {dim, *_lasts(types)} & {*DATA_DIMS, *before}:
        raise TypingError("concat joins dims of the model, to one that its operands lack")
    return [(dtype, (*before, dim))]


def _lasts(types: Sequence[Type]) -> tuple[str, ...]:
    return tuple(dim for type in types for dim in type.dims[-1:])


def _sum_of_lasts(types: Sequence[Type], op: Op) -> Mapping[str, tuple[str, ...]]:
    return {str(op.get("as")): _lasts(types)}


def _all_joined(types: Sequence[Type], op: Op) -> frozenset[str]:
    return frozenset((str(op.get("as")), *_lasts(types)))


def _adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    parts = _lasts([b.type(name) for name in op.inputs])
    return list(b.emit("concat_dx", grads, op.inputs, parts=parts))


def _parted(types: Sequence[Type], op: Op) -> list[Shape]:
    (dy,) = types
    return [(dy.dtype, (*dy.dims[:-1], part)) for part in op.names("parts")]


def _sum_of_parts(types: Sequence[Type], op: Op) -> Mapping[str, tuple[str, ...]]:
    return {types[0].dims[-1]: op.names("parts")}


def _all_parted(types: Sequence[Type], op: Op) -> frozenset[str]:
    return frozenset((types[0].dims[-1], *op.names("parts")))


CONCAT = OpDef(
    "concat",
    "The operands one behind the other along their last dims; these together are the dim `as`.",
    _joined,
    operands=(Operand("x"),),
    attributes=(Attribute("as", dims="any"),),
    more=True,
    linear=((ALL,),),
    whole=_all_joined,
    joins=_sum_of_lasts,
    adjoint=_adjoint,
    function="concat",
    surface=True,
)

CONCAT_DX = OpDef(
    "concat_dx",
    "The gradients of concat's operands: slices of the last dim, which the dims `parts` make up.",
    _parted,
    operands=takes("dy"),
    attributes=(Attribute("parts", kinds=(tuple,)),),
    linear=((0,),),
    whole=_all_parted,
    joins=_sum_of_parts,
)
