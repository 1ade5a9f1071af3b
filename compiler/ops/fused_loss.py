"""The last product and the cross entropy of its logits as one op, in which no rank ever holds its logits all at once.

For ranks that each have the whole vocabulary.  It reads logits in chunks of tokens, and makes their gradients with
them (`scalec.runtime.kernels`, whose `linear_cross_entropy` says what that costs).
Non-goals: a vocabulary that ranks share out (`parts`); where the op stands (`passes.fuse_ops`).
"""

from collections.abc import Sequence

from attrs import evolve

from ..ir import Op, Type
from .chunked_logits import INNER, PRODUCT, check, chunk, gradients
from .loss import CAP, SMOOTHING, wide
from .protocol import Attribute, Builder, OpDef, Shape, takes
from .saved_tensors import Local, Saved


def _total(types: Sequence[Type], op: Op) -> list[Shape]:
    check(op, *types)
    return [(wide(types[0].dtype), ())]


def _whole(types: Sequence[Type], op: Op) -> frozenset[str]:
    """All dims of the weight."""
    return frozenset(types[_weight_of(op)].dims)


def _weight_of(op: Op) -> int:
    return 2 if op.kind in GRADIENTS else 1


def _like_x(types: Sequence[Type], op: Op) -> list[Shape]:
    return [(types[1].dtype, types[1].dims)]


def _like_weight(types: Sequence[Type], op: Op) -> list[Shape]:
    return [(types[2].dtype, types[2].dims)]


def _like_bias(types: Sequence[Type], op: Op) -> list[Shape]:
    return [(types[4].dtype, types[4].dims)]


def _adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    return gradients(op, [*grads, *map(b.saved, op.inputs)], GRADIENTS, b)


def _gradients(it: Local) -> Saved:
    """Those of a loss that counts once, made with it."""
    made = [(KEPT[kind], i) for kind, i in GRADIENTS.items() if i < len(it.types) and it.wanted[i]]
    return Saved(others=tuple((what, it.bytes(i)) for what, i in made))


def _chunk(it: Local) -> int:
    """Of forward and backward, which is done with it; the bias' gradient adds up in float32."""
    return sum(chunk(it, 0, by_tokens=True)) + sum(it.widened(i) for i in range(3, len(it.types)))


LINEAR_CROSS_ENTROPY = OpDef(
    "linear_cross_entropy",
    "The cross entropy of the logits cap · tanh(l / cap), l where cap is 0, of l = x·w + bias: with smoothing and z as"
    " cross_entropy.",
    _total,
    operands=PRODUCT,
    attributes=(INNER, SMOOTHING, Attribute("z", default=0.0), CAP),
    whole=_whole,
    adjoint=_adjoint,
    function="linear_cross_entropy",
    saves=_gradients,
    scratch=_chunk,
)
LINEAR_CROSS_ENTROPY_DX = OpDef(
    "linear_cross_entropy_dx",
    "The gradient of linear_cross_entropy's operand.",
    _like_x,
    operands=(*takes("dy"), *PRODUCT),
    attributes=LINEAR_CROSS_ENTROPY.attributes,
    linear=((0,),),
    whole=_whole,
)
LINEAR_CROSS_ENTROPY_DW = evolve(
    LINEAR_CROSS_ENTROPY_DX,
    name="linear_cross_entropy_dw",
    doc="The gradient of its weight.",
    shapes=_like_weight,
)
LINEAR_CROSS_ENTROPY_DB = evolve(
    LINEAR_CROSS_ENTROPY_DX,
    name="linear_cross_entropy_db",
    doc="The gradient of its bias.",
    shapes=_like_bias,
)
GRADIENTS = {LINEAR_CROSS_ENTROPY_DX.name: 0, LINEAR_CROSS_ENTROPY_DW.name: 1, LINEAR_CROSS_ENTROPY_DB.name: 3}
"""The ops that give gradients, and of which operand."""

KEPT = dict(zip(GRADIENTS, ("gradient", "gradient of the weight", "gradient of the bias"), strict=True))
"""What forward keeps of them, and backward scales in place."""
