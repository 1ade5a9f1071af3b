"""Dropout, and the draws that decide which elements each dropout drops.

A model with dropout has a further input, `draws`: one integer for each sample, computed from the
seed and the sample's number in the run.  An op's mask is a function of the draw, of the op's `site`
among the model's dropouts, and of the element's global index in the sample; so it is the same on
every mesh, and in backward.

Non-goals: that function (`runtime.ops.dropout`; the proof has one of its own).
"""

from collections.abc import Sequence

from ..ir import BATCH, SEQUENCE, Op, Type
from .call import Argument, Call, Dims, Group, Positions, Shards, Size, part_of
from .protocol import Attribute, OpDef, Operand, Shape, TypingError, Vjp, takes
from .saved_tensors import Local

DRAWS = Operand("draws", input_name="draws", implied=True)
SITE = Attribute("site", kinds=(int,), implied=True)


def are_draws(type: Type) -> bool:
    """Whether values of this type are draws; no others are integers without a sequence."""
    return (type.dtype, type.dims) == ("i64", (BATCH,))


def check_draws(draws: Type, x: Type) -> None:
    """Raises TypingError where `draws` are not one for each sample of `x`."""
    if not are_draws(draws) or BATCH not in x.dims:
        raise TypingError(
            f"dropout draws for each sample, of which [{', '.join(x.dims)}] knows nothing"
        )


def _dropout_shape(types: Sequence[Type], op: Op) -> list[Shape]:
    """Elements are counted sample by sample with the positions outermost, wherever `batch` lies
    in memory.
    """
    x, draws = types
    check_draws(draws, x)
    if SEQUENCE in [dim for dim in x.dims if dim != BATCH][1:]:
        raise TypingError(f"dropout takes [batch, seq, …], not [{', '.join(x.dims)}]")
    return [(x.dtype, x.dims)]


def _call(local: Local) -> Call:
    """The dim of samples, and the other dims if this rank has a part of them."""
    type, (samples,) = local.types[0], local.types[1].dims
    shards: dict[str, Group | Positions] = {}
    for dim in type.dims:
        if dim != samples and type.axes_of(dim):
            shards[dim] = part_of(local, type, dim)
    options: dict[str, Argument] = {**dict(local.op.attrs), "batch": Dims((samples,))}
    if shards:
        options["split"] = Shards(shards)
    return Call(options=options)


DROPOUT = OpDef(
    "dropout",
    "Zero with probability `p`, else x / (1 − p), each element by itself (Srivastava et al. 2014).",
    _dropout_shape,
    operands=(Operand("x"), DRAWS),
    attributes=(Attribute("p", share=True), SITE),
    linear=((0,),),
    vjp=Vjp(unread=(0,)),
    function="dropout",
    call=_call,
    stem="y",
    user_visible=True,
)

FORK = OpDef(
    "fork",
    "Draws for each iteration of a repeat.",
    lambda types, op: [(types[0].dtype, (str(op.get("repeat")), *types[0].dims))],
    operands=takes("draws"),
    attributes=(Attribute("repeat", kinds=(str,)),),
    unsharded_dims=lambda types, op: frozenset((str(op.get("repeat")),)),
    function="fork",
    call=lambda local: Call((Size(str(local.op.get("repeat"))),)),
)
