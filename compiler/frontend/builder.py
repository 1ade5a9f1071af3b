"""Writes the model's ops, typed as they are written."""

from collections.abc import Mapping, Sequence
from itertools import chain, repeat

from attrs import evolve

from ..ir import Attr, Names, Op, Program, Region, Stmt, Type, Value
from ..ops import OPS, OpDef, TypingError
from ..syntax.source import Span
from .errors import check_count, wrong

Attrs = tuple[tuple[str, Attr], ...]


class Writer:
    """The statements of the region under construction, and the types of all values."""

    def __init__(self, frame: Program) -> None:
        self._frame = frame
        self._names = Names()
        self._types: dict[str, Type] = {}
        self._out: list[Stmt] = []

    @property
    def types(self) -> Mapping[str, Type]:
        """The type of each value so far."""
        return self._types

    @property
    def body(self) -> tuple[Stmt, ...]:
        """Statements written since the region was opened."""
        return tuple(self._out)

    def open(self) -> list[Stmt]:
        """Begins a region's body; returns what `close` needs to end it."""
        outer, self._out = self._out, []
        return outer

    def close(self, outer: list[Stmt], region: Region) -> None:
        """Goes on in the enclosing body, behind `region`."""
        self._out = [*outer, region]

    def op(self, kind: str, inputs: tuple[str, ...], attrs: Attrs, span: Span, like: str) -> str:
        """Writes an op of one result."""
        return self.several(kind, inputs, attrs, span, (like,))[0]

    def several(
        self, kind: str, inputs: tuple[str, ...], attrs: Attrs, span: Span, like: Sequence[str]
    ) -> tuple[str, ...]:
        """Writes an op; its results, named after `like` or the kind.

        Raises PlanError where its operands do not fit, or its results are not as many as `like`.
        """
        op, operands = Op(kind, inputs, (), attrs, span=span), [self._types[name] for name in inputs]
        try:
            types = OPS[kind].infer(self._frame, operands, op)
        except TypingError as error:
            raise wrong("E0307", str(error), span, _shown(OPS[kind], operands)) from None
        check_count(len(types), like, span)
        stem = f"_{OPS[kind].stem or kind}"
        values = tuple(self.value(name or stem, type) for name, type in zip(like, types, strict=True))
        self._out.append(evolve(op, outputs=values))
        return tuple(value.name for value in values)

    def value(self, like: str, type: Type) -> Value:
        """A new value."""
        value = Value(self.reserve(like), type)
        self._types[value.name] = type
        return value

    def reserve(self, like: str) -> str:
        """A name that no value gets."""
        return self._names.fresh(like)


def _shown(entry: OpDef, types: Sequence[Type]) -> str:
    """The dims of operands, with names where a plan calls the op by its own."""
    names = (operand.name if entry.user_visible else "" for operand in entry.operands)
    *first, last = (
        f"{name}[{', '.join(type.dims)}]" for name, type in zip(chain(names, repeat("")), types, strict=False)
    )
    return f"{', '.join(first)} and {last}" if first else last
