"""The last product and the cross entropy of its logits as one op, whose logits are never all in
memory.

For ranks that each have the whole vocabulary.  It computes logits in chunks of tokens, and their
gradients along with them (`runtime.kernels.linear_cross_entropy` says what that costs).  Non-goals:
a sharded vocabulary (`fused_parallel_loss`); where the op is used (`passes.fuse_ops`).
"""

from collections.abc import Sequence
from functools import partial

from ..ir import Op, Type
from .chunked_logits import INNER, PRODUCT, check, chunk, logits_work, product_call, product_roles
from .loss import CAP, SMOOTHING, Z, wide
from .protocol import OpDef, Shape, Vjp
from .saved_tensors import Local, Saved

KEPT = {"x": "gradient", "w": "gradient of the weight", "bias": "gradient of the bias"}
"""The gradients that forward makes and keeps, and backward scales in place, by operands."""


def _total(types: Sequence[Type], op: Op) -> list[Shape]:
    check(op, *types)
    return [(wide(types[0].dtype), ())]


def _gradients(local: Local) -> Saved:
    """The saved gradients of a loss that counts once, computed with it."""
    others: list[tuple[str, int]] = []
    for i, operand in enumerate(PRODUCT):
        if operand.name in KEPT and i < len(local.types) and local.wanted[i]:
            others.append((KEPT[operand.name], local.bytes(i)))
    return Saved(others=tuple(others))


def _chunk(local: Local) -> int:
    """The workspace of forward, which computes the gradients too; the bias' gradient is summed
    in float32.
    """
    biases = range(3, len(local.types))
    return sum(chunk(local, by_tokens=True)) + sum(map(local.wide_bytes, biases))


LINEAR_CROSS_ENTROPY = OpDef(
    "linear_cross_entropy",
    "The cross entropy of the logits cap · tanh(l / cap), l where cap is 0, of l = x·w + bias:"
    " with smoothing and z as"
    " cross_entropy.",
    _total,
    operands=PRODUCT,
    attributes=(INNER, SMOOTHING, Z, CAP),
    roles=product_roles,
    unsharded_dims=lambda types, op: frozenset(types[1].dims),  # the weight's
    vjp=Vjp(from_forward=KEPT, delayed=True),
    function="linear_cross_entropy",
    call=product_call,
    saves=_gradients,
    workspace=_chunk,
    work=partial(logits_work, of_x=1, of_w=1),
)
