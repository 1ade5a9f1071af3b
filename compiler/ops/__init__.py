"""The table of ops.  A new op is an entry in a family's module, its name here, and a test."""

from . import (
    algebra,
    attention,
    dropout,
    embedding,
    fused,
    head,
    join,
    loss,
    norm,
    parts,
    pointwise,
    reduce,
    rejoined,
    step,
    user,
)
from .protocol import Attribute, Builder, OpDef, Operand, TypingError

_NAMED = (
    entry
    for family in (algebra, attention, dropout, embedding, head, join, loss, norm, parts, reduce, rejoined, step, user)
    for entry in vars(family).values()
    if isinstance(entry, OpDef)
)

OPS: dict[str, OpDef] = {
    entry.name: entry for entry in (*_NAMED, *pointwise.FUNCTIONS, *pointwise.SLOPES, *fused.ENTRIES)
}

__all__ = ["OPS", "Attribute", "Builder", "OpDef", "Operand", "TypingError"]
