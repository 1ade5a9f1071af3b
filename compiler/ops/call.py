"""The call of an op in an emitted program: its arguments besides the operands, in the words of the IR.

The emitter writes a dim as its index and axes as their group of ranks (`emit.expressions`).  The read-back follows the
dims of the tensors in the text and resolves indices and groups by these (`emit.readback.calls`), so that each is a
check of the other.
"""

from collections.abc import Callable, Mapping

from attrs import Factory, frozen

from ..ir import Attr, Op
from .saved_tensors import Local


@frozen
class Dims:
    """Dims of the first operand, as their indices: `dim=1`, or `dim=(0, 2)`."""

    names: tuple[str, ...]


@frozen
class Group:
    """The group of ranks over some axes: `self.tp`."""

    axes: tuple[str, ...]


@frozen
class Shards:
    """Dims of the first operand with the axes that shard each: `{1: self.tp}`."""

    axes: Mapping[str, tuple[str, ...]]


@frozen
class Keyword:
    """An operand that is passed by keyword."""

    operand: int


@frozen
class RotaryTable:
    """The table of rotary positions that the op rotates by."""


Argument = Attr | Dims | Group | Shards | Keyword | RotaryTable


@frozen
class Call:
    """The arguments that follow the operands, and those by keyword."""

    args: tuple[Argument, ...] = ()
    options: Mapping[str, Argument] = Factory(dict[str, Argument])


CallOf = Callable[[Local], Call]


def with_attributes(it: Local) -> Call:
    """All attributes, by their names."""
    return Call(options=dict(it.op.attrs))


def numbers(op: Op) -> dict[str, Argument]:
    """The attributes that are numbers, by their names."""
    return {key: value for key, value in op.attrs if isinstance(value, int | float)}


def over_classes(it: Local, dim: str, axes: tuple[str, ...], **options: Argument) -> Call:
    """A call that knows which of the classes `dim` this rank has, and how many are no padding; and its numbers."""
    valid = it.program.valid(dim)
    padding = {"classes": valid} if valid < it.program.size(dim) else {}
    return Call((Group(axes),) if axes else (), {**options, **padding, **numbers(it.op)})
