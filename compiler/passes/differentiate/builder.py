"""Appends typed ops to a body: what the parts of `differentiate` write with."""

from collections.abc import Sequence

from attrs import evolve

from ...ir import Attr, Kind, Names, Op, Program, Stmt, Type, Value
from ...ir.placements import Step, path
from ...ops import OPS
from ...syntax.source import Span


class Book:
    """The names and types of a program's values, shared by all who write to it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.types = dict(program.types)
        self._names = Names(self.types)

    def value(self, like: str, type: Type) -> Value:
        """A new value, named like `like`."""
        value = Value(self._names.fresh(like), type)
        self.types[value.name] = type
        return value


class Writer:
    """A body under construction."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self.out: list[Stmt] = []

    def write(
        self, kind: str, inputs: Sequence[str], like: Sequence[str], span: Span, **attrs: Attr
    ) -> tuple[str, ...]:
        """Appends an op with results named like `like`, typed as its entry infers."""
        due = tuple(Value(name, Type("", ())) for name in like)
        return self.typed(Op(kind, tuple(inputs), due, tuple(attrs.items()), span=span))

    def typed(self, op: Op) -> tuple[str, ...]:
        """Appends an op with results named like those that it has, typed as its entry infers."""
        found = OPS[op.kind].infer(self.book.program, [self.book.types[name] for name in op.inputs], op)
        pairs = zip(op.outputs, found, strict=True)
        return self.append(evolve(op, outputs=tuple(self.book.value(due.name, type) for due, type in pairs)))

    def append(self, op: Op) -> tuple[str, ...]:
        """Appends an op as it is; returns its results."""
        self.out.append(op)
        return tuple(value.name for value in op.outputs)

    def coerce(self, name: str, step: Step, like: str, span: Span) -> str:
        """Appends a coercion of `name`."""
        type = step.applied(self.book.types[name], self.book.program)
        return self.append(step.op(name, self.book.value(like, type), span))[0]

    def reduced(self, name: str, span: Span) -> str:
        """`name` with its pending sums done."""
        type = self.book.types[name]
        want = tuple((axis, place) for axis, place in type.places if place.kind is not Kind.PARTIAL)
        for step in path(self.book.program, type, want):
            name = self.coerce(name, step, name, span)
        return name
