"""Sums, means and softmax over named dims.

A sum or a mean over a sharded dim is a sum over ranks still to be done; a mean divides by global
sizes, so it needs no other rule.  Non-goals: softmax over a sharded dim.
"""

from collections.abc import Sequence
from math import prod

from attrs import evolve

from ..ir import BATCH, Op, Type
from .call import Call, CallOf, Dims
from .pointwise import same
from .protocol import FUNCTIONAL, RUNTIME, TORCH, Attribute, OpDef, Operand, Shape, TypingError, Vjp
from .saved_tensors import Local

OVER = Attribute("over", dims="own")


def _reduction_shape(types: Sequence[Type], op: Op) -> list[Shape]:
    (x,), over = types, op.names("over")
    if not over or len({*over}) < len(over):
        raise TypingError(f"{op.kind} goes over dims, each named once")
    return [(x.dtype, tuple(dim for dim in x.dims if dim not in over))]


def over_dims(local: Local) -> Call:
    """The dims, by their indices."""
    return Call(options={"dim": Dims(local.op.names("over"))})


def mean_over_dims(local: Local) -> Call:
    """The dims, and their global size, since a rank may have a part of them."""
    dims = local.op.names("over")
    return Call(options={"dim": Dims(dims), "size": prod(map(local.program.size, dims))})


def _reduction(name: str, doc: str, module: str, call: CallOf) -> OpDef:
    return OpDef(
        name,
        doc,
        _reduction_shape,
        operands=(Operand("x"),),
        attributes=(OVER,),
        linear=((0,),),
        vjp=Vjp(unread=(0,)),
        function=name,
        torch="" if module == TORCH else name,
        call=call,
        module=module,
        user_visible=True,
    )


SUM = _reduction(
    "sum", "The sum over the dims `over`; also the gradient of a broadcast.", TORCH, over_dims
)
MEAN = _reduction(
    "mean",
    "The sum over the dims `over`, divided by the product of their global sizes.",
    RUNTIME,
    mean_over_dims,
)


def along_one(types: Sequence[Type], op: Op) -> list[Shape]:
    """The operand's element type and dims.

    Raises TypingError unless the op goes over one dim, which is not batch.
    """
    over = op.names("over")
    if len(over) != 1 or over == (BATCH,):
        raise TypingError(f"{op.kind} goes over one dim, which is not batch")
    return same(types, op)


def over(types: Sequence[Type], op: Op) -> frozenset[str]:
    """The dims that an op goes over."""
    return frozenset(op.names("over"))


SOFTMAX = OpDef(
    "softmax",
    "exp(x) / Σ exp(x), the sum over the dim `over`.",
    along_one,
    operands=(Operand("x"),),
    attributes=(evolve(OVER, dims="last"),),
    unsharded_dims=over,
    vjp=Vjp(unread=(0,), result=True),
    function="softmax",
    call=over_dims,
    module=FUNCTIONAL,
    stem="p",
    user_visible=True,
)
