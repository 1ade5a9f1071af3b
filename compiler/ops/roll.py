"""Positions along a dim moved around, as in token shifts and circular convolutions."""

from collections.abc import Sequence

from attrs import evolve

from ..ir import Op
from .call import Call, Dims
from .protocol import TORCH, Attribute, OpDef, Operand, Vjp
from .reduce import OVER, along_one, over


def _source(op: Op, size: int) -> Sequence[int]:
    by = int(str(op.get("by")))
    return [(i - by) % size for i in range(size)]


ROLL = OpDef(
    "roll",
    "Position i along the dim `over` of x at i + `by`; positions beyond the last begin at the"
    " first.",
    along_one,
    operands=(Operand("x"),),
    attributes=(Attribute("by", kinds=(int,)), evolve(OVER, dims="last")),
    linear=((0,),),
    unsharded_dims=over,
    permutes=_source,
    vjp=Vjp(unread=(0,)),
    function="roll",
    call=lambda local: Call(
        options={"shifts": local.op.get("by"), "dims": Dims(local.op.names("over"))}
    ),
    module=TORCH,
    user_visible=True,
)
