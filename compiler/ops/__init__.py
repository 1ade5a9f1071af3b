"""The table of ops.  A new op is an entry in a family's module, its name here, and a test."""

from . import algebra, attention, embedding, loss, norm, pointwise, step
from .protocol import Attribute, Builder, OpDef, Operand, TypingError

OPS: dict[str, OpDef] = {
    entry.name: entry
    for family in (algebra, attention, embedding, loss, norm, pointwise, step)
    for entry in vars(family).values()
    if isinstance(entry, OpDef)
}

__all__ = ["OPS", "Attribute", "Builder", "OpDef", "Operand", "TypingError"]
