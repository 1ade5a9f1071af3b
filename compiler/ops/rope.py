"""Rotary positions, of one tensor or of queries and keys."""

from collections.abc import Sequence

from attrs import evolve

from ..ir import SEQUENCE, Op, Program, Type
from .call import Call, RotaryTable
from .pointwise import same
from .protocol import Attribute, OpDef, Operand, Range, Shape, TypingError, Vjp, last_dim, takes
from .roles import Roles
from .saved_tensors import Local


def rope_roles(types: Sequence[Type], op: Op) -> Roles:
    """The roles of an op whose operands are rotated."""
    return Roles(query_seq=SEQUENCE, rotated=types[0].dims[-1])


def _rope_shape(types: Sequence[Type], op: Op) -> list[Shape]:
    if SEQUENCE not in types[0].dims[:-1]:
        raise TypingError(
            f"rope turns the last dim by the position in `{SEQUENCE}`, which is not before it"
        )
    return same(types, op)


def _turning(local: Local) -> int:
    """Two products that go into the result; a kernel has them in registers, and its twin in
    float32 at least.
    """
    if local.runs_kernel:
        return 0
    if local.kernels:
        return _product_bytes(local, 0) - local.bytes()
    return 2 * local.bytes()


def _turning_both(local: Local) -> int:
    """The products of queries, then the products of keys, while the first result is there."""
    of_q, of_k = 0, 0
    if not local.runs_kernel:
        of_q, of_k = _product_bytes(local, 0), _product_bytes(local, 1)
    q, k = local.bytes(0), local.bytes(1)
    return max(of_q, q + of_k, q + k) - q - k


def _product_bytes(local: Local, operand: int) -> int:
    """The bytes of two products and their sum, over the dims that are rotated."""
    size = local.program.size(local.types[operand].dims[-1])
    turned = round(float(str(dict(local.op.attrs).get("dims", size))))
    return max(3 * local.wide_bytes(operand) * turned // size, local.bytes(operand))


_ABOVE_0: Range = (lambda value: value > 0, "a number above 0, for instance 10000")

ROPE = OpDef(
    "rope",
    "Rotates pairs (x[i], x[i + d/2]) of the last dim, or of its first `dims`, by position ·"
    " theta^(-2i/d) (Su et al."
    " 2021).  scaling linear divides angles by `factor` (Chen et al. 2023); llama3 those of"
    " wavelengths over original /"
    " low, none under original / high, and between them a part (Grattafiori et al. 2024); yarn"
    " likewise, in equal steps"
    " between whole pairs (Peng et al. 2023).",
    _rope_shape,
    operands=(Operand("x"),),
    attributes=(
        Attribute("theta", range=_ABOVE_0),
        Attribute("dims", default=0.0),
        Attribute("scaling", choices=("none", "linear", "llama3", "yarn"), default="none"),
        Attribute("factor", default=1.0, range=_ABOVE_0),
        Attribute("low", default=1.0, range=_ABOVE_0),
        Attribute("high", default=4.0, range=_ABOVE_0),
        Attribute("original", default=8192.0, range=_ABOVE_0),
    ),
    linear=((0,),),
    roles=rope_roles,
    unsharded_dims=last_dim,
    vjp=Vjp(unread=(0,), workspace=_turning),
    function="rope",
    torch="rope",
    call=lambda local: Call((RotaryTable(),)),
    stem="r",
    workspace=_turning,
    user_visible=True,
)


def _rope_pair_types(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    """The types that rope gives to each operand."""
    single = evolve(op, kind=ROPE.name)
    return [ROPE.infer(program, [type], single)[0] for type in types]


ROPE_PAIR = OpDef(
    "rope_pair",
    "rope of queries and of keys, in one pass.",
    operands=takes("q", "k"),
    attributes=ROPE.attributes,
    typing=_rope_pair_types,
    roles=rope_roles,
    vjp=Vjp(unread=(0, 1), workspace=_turning_both),
    function="rope_pair",
    call=lambda local: Call((RotaryTable(),)),
    workspace=_turning_both,
)
