"""The call of an op in an emitted program: its arguments besides the operands, in the words of the
IR.

The emitter writes a dim as its index and axes as their group of ranks (`emit.expressions`).  The
read-back follows the dims of the tensors in the text and resolves indices and groups by these
(`emit.readback.calls`), so that each is a check of the other.
"""

from collections.abc import Callable, Mapping

from attrs import Factory, frozen

from ..ir import Attr, Op, Program, Type
from .saved_tensors import Local


@frozen
class Dims:
    """Dims of the first operand, as their indices: `dim=1`, or `dim=(0, 2)`."""

    names: tuple[str, ...]


@frozen
class Size:
    """The size of a dim, or of the part of it that a rank has over some axes: `LAYERS`,
    `VOCAB // 4`.
    """

    dim: str
    axes: tuple[str, ...] = ()

    def value(self, program: Program) -> int:
        """The number that the text stands for."""
        return program.size(self.dim) // program.degree(self.axes)


@frozen
class Group:
    """The group of ranks over some axes: `self.tp`."""

    axes: tuple[str, ...]


@frozen
class Positions:
    """The positions along a dim that this rank holds, where axes shard it: `self.positions`."""

    dim: str
    axes: tuple[str, ...]


@frozen
class PositionIds:
    """Such positions as a tensor of whole numbers, of a dim that axes may shard:
    `self.position_ids`.
    """

    dim: str
    axes: tuple[str, ...]


@frozen
class Shards:
    """Dims of the first operand with the part of each that this rank holds: `{1: self.tp}`."""

    parts: Mapping[str, Group | Positions]


@frozen
class Keyword:
    """An operand that is passed by keyword."""

    operand: int


@frozen
class RotaryTable:
    """The table of rotary positions that the op rotates by."""


@frozen
class Experts:
    """The experts over some axes; the axes `tokens` have parts of the tokens: `self.experts`."""

    dim: str
    axes: tuple[str, ...]
    tokens: tuple[str, ...]


@frozen
class Quotient:
    """A number of a plan, divided by a whole number: `1e-4 / 15360`."""

    value: float
    divisor: int


Layout = Positions | PositionIds | Experts
"""A table that a module makes once, from the mesh."""

Argument = (
    Attr
    | Dims
    | Size
    | Group
    | Shards
    | Positions
    | PositionIds
    | Keyword
    | RotaryTable
    | Experts
    | Quotient
)


@frozen
class Call:
    """The arguments that follow the operands, and arguments by keyword."""

    args: tuple[Argument, ...] = ()
    options: Mapping[str, Argument] = Factory(dict[str, Argument])


CallOf = Callable[[Local], Call]


def part_of(local: Local, type: Type, dim: str) -> Group | Positions:
    """The part of a dim that a rank holds: by the group that shards it where each of its ranks
    has one part.
    """
    axes = type.axes_of(dim)
    in_order = [axis.name for axis in local.program.axes if axis.name in axes] == [*axes]
    if in_order and not local.program.zigzag_axes(dim, axes):
        return Group(axes)
    return Positions(dim, axes)


def with_attributes(local: Local) -> Call:
    """All attributes, by their names."""
    return Call(options=dict(local.op.attrs))


def numbers(op: Op) -> dict[str, Argument]:
    """The attributes that are numbers, by their names."""
    return {key: value for key, value in op.attrs if isinstance(value, int | float)}


def over_classes(local: Local, dim: str, axes: tuple[str, ...], **options: Argument) -> Call:
    """A call that knows which of the classes `dim` this rank has, and how many are no padding;
    and its numbers.
    """
    valid = local.program.valid(dim)
    if valid < local.program.size(dim):
        options["classes"] = valid
    return Call((Group(axes),) if axes else (), options | numbers(local.op))
