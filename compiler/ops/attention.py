"""Rotary positions and attention.

Non-goals: sharding the sequence inside attention, which is context parallelism.
"""

from collections.abc import Sequence

from ..ir import Op, Placement, Type
from .pointwise import same
from .protocol import Attribute, Builder, OpDef, Operand, Shape, TypingError, takes

SEQUENCE = "seq"


def head_dims(q: Type, k: Type) -> tuple[str, str]:
    """The dims that count query heads and key/value heads: each operand's one besides batch, sequence and the last."""
    return _heads(q), _heads(k)


def _heads(type: Type) -> str:
    found = [dim for dim in type.dims[:-1] if dim not in ("batch", SEQUENCE)]
    if len(found) != 1 or SEQUENCE not in type.dims:
        raise TypingError(f"attention takes [batch, seq, heads, head_dim], not [{', '.join(type.dims)}]")
    return found[0]


def _attended(types: Sequence[Type], op: Op) -> list[Shape]:
    q, k, v = types
    heads, kv_heads = head_dims(q, k)
    if k.dims != v.dims or k.dims != tuple(kv_heads if dim == heads else dim for dim in q.dims):
        raise TypingError("attention needs queries, keys and values of the same dims but for the heads")
    return [(q.dtype, q.dims)]


def _rotated(types: Sequence[Type], op: Op) -> list[Shape]:
    if SEQUENCE not in types[0].dims[:-1]:
        raise TypingError(f"rope turns the last dim by the position in `{SEQUENCE}`, which is not before it")
    return same(types, op)


def _sequence_and_last(types: Sequence[Type], op: Op) -> frozenset[str]:
    return frozenset((SEQUENCE, types[0].dims[-1]))


def _heads_alike(types: Sequence[Type], op: Op, places: Sequence[Placement]) -> bool:
    """Key/value heads are sharded only together with the query heads that use them."""
    q, k = types[:2] if op.kind == "attention" else types[1:3]
    heads, kv_heads = head_dims(q, k)
    split = {place.dim for place in places} - {""}
    return split == {heads, kv_heads} or (len(split) == 1 and split != {kv_heads})


def _attention_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    saved = [b.saved(name) for name in (*op.inputs, op.outputs[0].name)]
    return list(b.emit("attention_dx", [*grads, *saved], op.inputs, mask=op.get("mask")))


def _qkv(types: Sequence[Type], op: Op) -> list[Shape]:
    return [(t.dtype, t.dims) for t in types[1:4]]


def _rope_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    return [b.emit("rope_dx", grads, op.inputs, theta=op.get("theta"))[0]]


ROPE = OpDef(
    "rope",
    "Rotates pairs (x[i], x[i + d/2]) of the last dim by position · theta^(-2i/d) (Su et al. 2021).",
    _rotated,
    operands=(Operand("x"),),
    attributes=(Attribute("theta"),),
    linear=((0,),),
    whole=_sequence_and_last,
    adjoint=_rope_adjoint,
    function="rope",
    surface=True,
)

ROPE_DX = OpDef(
    "rope_dx",
    "The rotation back.",
    same,
    operands=takes("dy"),
    attributes=ROPE.attributes,
    linear=((0,),),
    whole=_sequence_and_last,
)

ATTENTION = OpDef(
    "attention",
    "softmax(q·kᵀ / sqrt(d) + mask)·v; query head i uses key/value head i // (heads / kv_heads) (Ainslie et al. 2023).",
    _attended,
    operands=(Operand("q"), Operand("k"), Operand("v")),
    attributes=(Attribute("mask", choices=("causal",)),),
    whole=_sequence_and_last,
    allows=_heads_alike,
    adjoint=_attention_adjoint,
    function="attention",
    surface=True,
)

ATTENTION_DX = OpDef(
    "attention_dx",
    "The gradients of q, k and v, from dy, q, k, v and the result (Dao 2023, appendix).",
    _qkv,
    operands=takes("dy", "q", "k", "v", "y"),
    attributes=ATTENTION.attributes,
    linear=((0,),),
    whole=_sequence_and_last,
    allows=_heads_alike,
)
