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
    """Key/value heads are sharded only together with the query heads that use them, over the outer of their axes."""
    q, k = types[:2] if op.kind == "attention" else types[1:3]
    heads, kv_heads = head_dims(q, k)
    split = {place.dim for place in places} - {""}
    outer = q.axes_of(heads)[: len(k.axes_of(kv_heads))] == k.axes_of(kv_heads)
    return outer and (split == {heads, kv_heads} or (len(split) == 1 and split != {kv_heads}))


def _attention_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    saved = [b.saved(name) for name in (*op.inputs, op.outputs[0].name)]
    return list(b.emit("attention_dx", [*grads, *saved], op.inputs, **dict(op.attrs)))


def _qkv(types: Sequence[Type], op: Op) -> list[Shape]:
    return [(t.dtype, t.dims) for t in types[1:4]]


def _rope_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    return [b.emit("rope_dx", grads, op.inputs, **dict(op.attrs))[0]]


ROPE = OpDef(
    "rope",
    "Rotates pairs (x[i], x[i + d/2]) of the last dim, or of its first `dims`, by position · theta^(-2i/d) (Su et al."
    " 2021).  scaling linear divides angles by `factor` (Chen et al. 2023); llama3 those of wavelengths over original /"
    " low, none under original / high, and between them a part (Grattafiori et al. 2024).",
    _rotated,
    operands=(Operand("x"),),
    attributes=(
        Attribute("theta"),
        Attribute("dims", default=0.0),
        Attribute("scaling", choices=("none", "linear", "llama3"), default="none"),
        Attribute("factor", default=1.0),
        Attribute("low", default=1.0),
        Attribute("high", default=4.0),
        Attribute("original", default=8192.0),
    ),
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
    "softmax(cap(q·kᵀ · scale) + mask)·v; query head i uses key/value head i // (heads / kv_heads) (Ainslie et al."
    " 2023).  scale 0 is d^(-1/2); softcap c is c · tanh(x / c), 0 none; a query sees keys less than `window` away, 0"
    " all.",
    _attended,
    operands=(Operand("q"), Operand("k"), Operand("v")),
    attributes=(
        Attribute("mask", choices=("causal", "full")),
        Attribute("window", default=0.0),
        Attribute("scale", default=0.0),
        Attribute("softcap", default=0.0),
    ),
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
