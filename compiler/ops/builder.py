"""Writes ops with fresh names and the types that their entries infer."""

from collections.abc import Collection, Mapping, Sequence

from attrs import evolve

from ..ir import Attr, Kind, Names, Op, Program, Stmt, Type, Value
from ..ir.placements import Step, path
from ..syntax.source import Span
from . import OPS


def infer_types(program: Program, op: Op, types: Mapping[str, Type]) -> Op:
    """The op with results as its entry infers them.

    Raises TypingError where the operands do not fit.
    """
    result_types = OPS[op.kind].infer(program, [types[name] for name in op.inputs], op)
    results: list[Value] = []
    for result, type in zip(op.outputs, result_types, strict=True):
        results.append(Value(result.name, type))
    return evolve(op, outputs=tuple(results))


class OpBuilder:
    """A body under construction, the names and types of all values so far, and the span of the
    ops to come.
    """

    def __init__(
        self, program: Program, outer: "OpBuilder | None" = None, free: Collection[str] = ()
    ) -> None:
        """With an `outer` builder, whose names and types it shares, it builds another body of the
        same program.

        New values may take the names that are `free`.
        """
        self.program = program
        self.body: list[Stmt] = []
        self.types: dict[str, Type]
        self.names: Names
        self.span: Span
        if outer:
            self.types, self.names, self.span = outer.types, outer.names, outer.span
        else:
            self.types = dict(program.types)
            self.names = Names(program.types.keys() - {*free})
            self.span = program.region.span

    def inner(self) -> "OpBuilder":
        """The builder of another body."""
        return OpBuilder(self.program, self)

    def value(self, like: str, type: Type) -> Value:
        """A new value, named after `like`."""
        value = Value(self.names.fresh(like), type)
        self.types[value.name] = type
        return value

    def append(self, op: Op) -> str:
        """Appends an op as it is; returns its first result, if it has any."""
        self.types.update((value.name, value.type) for value in op.outputs)
        self.body.append(op)
        return op.outputs[0].name if op.outputs else ""

    def append_typed(self, op: Op) -> tuple[str, ...]:
        """Appends an op with new results, named after its own results and typed as its entry
        infers.
        """
        results: list[Value] = []
        for value in infer_types(self.program, op, self.types).outputs:
            results.append(self.value(value.name, value.type))
        self.body.append(evolve(op, outputs=tuple(results)))
        return tuple(value.name for value in results)

    def write(self, kind: str, inputs: Sequence[str], like: str, **attrs: Attr) -> str:
        """Appends an op of one result, named after `like`."""
        due = Value(like, Type("", ()))
        return self.append_typed(
            Op(kind, tuple(inputs), (due,), tuple(attrs.items()), span=self.span)
        )[0]

    def coerce(self, name: str, step: Step, like: str = "") -> str:
        """Appends a coercion, unless it is over no axis."""
        if not step.axes:
            return name
        value = self.value(like or name, step.type_after(self.types[name], self.program))
        return self.append(step.op(name, value, self.span))

    def cast(self, name: str, dtype: str) -> str:
        """Appends a cast, unless the value has the element type already."""
        if self.types[name].dtype == dtype:
            return name
        return self.write("cast", [name], name, dtype=dtype)

    def reduce(self, name: str) -> str:
        """The value with its pending sums done."""
        type = self.types[name]
        want = tuple((axis, place) for axis, place in type.places if place.kind is not Kind.PARTIAL)
        for step in path(self.program, type, want):
            name = self.coerce(name, step)
        return name
