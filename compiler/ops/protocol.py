"""The op protocol: what every op declares, and the typing rule that follows from it.

Purpose: one entry per op, from which placement, differentiation, checks, accounts and emission are read.
Non-goals: the entries themselves (one module per family beside this one).
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from attrs import frozen

from ..ir import INVARIANT, PARTIAL, REPLICATED, Attr, Kind, Op, Placement, Program, Type, sharded


class TypingError(Exception):
    """Operands that an op cannot take: dims that do not fit, or placements without a rule."""


class Builder(Protocol):
    """What an adjoint writes its ops with."""

    def emit(self, kind: str, inputs: Sequence[str], like: Sequence[str], **attrs: Attr) -> tuple[str, ...]:
        """Appends an op whose results are named after the gradients of `like`; returns the results."""
        ...

    def saved(self, name: str) -> str:
        """The forward value `name`, kept for backward."""
        ...

    def type(self, name: str) -> Type:
        """The type of a forward value."""
        ...

    def wanted(self, name: str) -> bool:
        """Whether anything needs the gradient of the forward value `name`."""
        ...


Shape = tuple[str, tuple[str, ...]]
"""Element type and dims of a result, before placement."""

Shapes = Callable[[Sequence[Type], Op], Sequence[Shape]]
Typing = Callable[[Program, Sequence[Type], Op], Sequence[Type]]
Adjoint = Callable[[Op, Sequence[str], Builder], Sequence[str | None]]
Expand = Callable[[Op, Callable[[str], str], Callable[[str], Type]], list[Op]]

ALL = -1
"""In `OpDef.linear`: every operand of an op of any number of operands."""


@frozen
class Operand:
    """An operand as a plan writes it; `init` is how a parameter first used here begins, "" for the model's `init`."""

    name: str
    dtype: str = "float"
    init: str = ""


@frozen
class Attribute:
    """A constant argument as a plan writes it: a number, or one of `choices`."""

    name: str
    choices: tuple[str, ...] = ()
    default: float | str | None = None


def nothing_whole(types: Sequence[Type], op: Op) -> frozenset[str]:
    """No dim has to be whole on each rank."""
    return frozenset()


@frozen
class OpDef:
    """One op.

    shapes    element types and dims of the results, from the operands'
    linear    groups of operands in each of which the op is jointly linear (they may be partial)
    whole     dims that each rank must hold whole
    contracts the placement of a result that lacks the dim that was sharded
    typing    replaces the generic typing rule
    adjoint   the gradients of the operands from those of the results: input-gradient and weight-gradient parts
    expand    rewrites a composite op whose dim `splits` is sharded into ops that show their collectives
    function  the runtime's function in emitted programs; "" where Python has an operator for it
    """

    name: str
    doc: str
    shapes: Shapes | None = None
    operands: tuple[Operand, ...] = ()
    attributes: tuple[Attribute, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    whole: Callable[[Sequence[Type], Op], frozenset[str]] = nothing_whole
    contracts: Placement = PARTIAL
    typing: Typing | None = None
    adjoint: Adjoint | None = None
    splits: Callable[[Sequence[Type]], str] | None = None
    expand: Expand | None = None
    function: str = ""
    surface: bool = False

    def infer(self, program: Program, types: Sequence[Type], op: Op) -> tuple[Type, ...]:
        """The types of the results.  Raises TypingError where no rule allows the operands."""
        if self.typing:
            return tuple(self.typing(program, types, op))
        assert self.shapes, f"op {self.name} declares neither shapes nor typing"
        shapes = tuple(self.shapes(types, op))
        at: list[dict[str, Placement]] = [{} for _ in shapes]
        for axis in program.axes:
            for result, place in zip(at, self._on_axis(axis.name, types, shapes, op), strict=True):
                result[axis.name] = place
        return tuple(Type(t, dims, program.places(p)) for (t, dims), p in zip(shapes, at, strict=True))

    def _on_axis(self, axis: str, types: Sequence[Type], shapes: Sequence[Shape], op: Op) -> list[Placement]:
        """The rule of one mesh axis: all invariant, or linear in what is partial, or sharded alike, or replicated."""
        floats = [t.at(axis) for t in types if t.dtype != "i64"]
        split = {t.at(axis).dim for t in types} - {""}
        if not split and all(place == INVARIANT for place in floats):
            return [INVARIANT] * len(shapes)
        partial = tuple(i for i, t in enumerate(types) if t.at(axis) == PARTIAL)
        if partial:
            self._require(partial in self._groups(len(types)), axis, types, "is not linear in what is partial")
            rest = [t.at(axis) for i, t in enumerate(types) if i not in partial and t.dtype != "i64"]
            self._require(
                all(place == REPLICATED for place in rest), axis, types, "needs its other operands replicated"
            )
            return [PARTIAL] * len(shapes)
        for type in types:
            held = [sharded(dim) for dim in type.dims if dim in split] or [REPLICATED, INVARIANT][
                : 1 + (type.dtype == "i64")
            ]
            self._require(type.at(axis) in held, axis, types, "needs its operands sharded alike")
        self._require(not split & self.whole(types, op), axis, types, "needs that dim whole")
        if not split:
            return [REPLICATED] * len(shapes)
        return [next((sharded(dim) for dim in dims if dim in split), self.contracts) for _, dims in shapes]

    def _groups(self, count: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(range(count)) if ALL in group else group for group in self.linear)

    def _require(self, holds: bool, axis: str, types: Sequence[Type], what: str) -> None:
        if not holds:
            places = ", ".join(str(t.at(axis)) for t in types)
            raise TypingError(f"{self.name} {what} on {axis}; its operands are {places}")


def missing(type: Type, within: Type) -> tuple[str, ...]:
    """The dims of `within` that `type` lacks."""
    return tuple(dim for dim in within.dims if dim not in type.dims)


def is_pending(type: Type) -> bool:
    """Whether a sum over ranks is still to be done."""
    return bool(type.axes_in(Kind.PARTIAL))
