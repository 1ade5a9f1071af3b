"""The table of ops.  A new op is an entry in a family's module, its name here, and a test."""

from collections.abc import Mapping

from ..ir import Op, Program, Type
from . import (
    algebra,
    attention,
    concat,
    dropout,
    embedding,
    fused,
    fused_loss,
    fused_parallel_loss,
    loss,
    norm,
    pointwise,
    reduce,
    rescaled_loss,
    step,
    user,
)
from .messages import Message
from .protocol import Attribute, Builder, OpDef, Operand, TypingError
from .roles import Roles
from .saved_tensors import Local
from .vjp import Vjps, gradients

_NAMED = (
    entry
    for family in (
        algebra,
        attention,
        dropout,
        embedding,
        fused_loss,
        concat,
        loss,
        norm,
        fused_parallel_loss,
        reduce,
        rescaled_loss,
        step,
        user,
    )
    for entry in vars(family).values()
    if isinstance(entry, OpDef)
)

OPS: dict[str, OpDef] = {entry.name: entry for entry in (*_NAMED, *pointwise.FUNCTIONS, *fused.ENTRIES)}
VJPS = Vjps(OPS)
OPS["vjp"] = VJPS.entry()


def messages(program: Program, op: Op, types: Mapping[str, Type]) -> tuple[Message, ...]:
    """What a rank sends each time it does an op, in order; `types` are of all values.  An unknown op sends nothing."""
    make = (entry := OPS.get(op.kind)) and entry.communicates
    return make(Local(program, op, tuple(types[name] for name in op.inputs))) if make else ()


def roles(op: Op, types: Mapping[str, Type]) -> Roles:
    """The dims of an op by what they mean to it; `types` are those of all values.  An unknown op has none."""
    make = (entry := OPS.get(op.kind)) and entry.roles
    return make([types[name] for name in op.inputs], op) if make else Roles()


def functions(module: str) -> set[str]:
    """The functions of `module` that emitted programs call for ops."""
    return {entry.function for entry in OPS.values() if entry.function and entry.module == module}


__all__ = [
    "OPS",
    "VJPS",
    "Attribute",
    "Builder",
    "OpDef",
    "Operand",
    "Roles",
    "TypingError",
    "functions",
    "gradients",
    "messages",
    "roles",
]
