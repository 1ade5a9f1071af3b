"""The table of ops.  A new op is an entry in a family's module, its name here, and a test."""

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
from .protocol import Attribute, Builder, OpDef, Operand, TypingError

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

OPS: dict[str, OpDef] = {
    entry.name: entry for entry in (*_NAMED, *pointwise.FUNCTIONS, *pointwise.SLOPES, *fused.ENTRIES)
}


def functions(module: str) -> set[str]:
    """The functions of `module` that emitted programs call for ops."""
    return {entry.function for entry in OPS.values() if entry.function and entry.module == module}


__all__ = ["OPS", "Attribute", "Builder", "OpDef", "Operand", "TypingError", "functions"]
