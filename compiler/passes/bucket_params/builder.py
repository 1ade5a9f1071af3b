"""Ops under construction, each typed as its entry infers.

Non-goals: which ops (`flat_params`, `layers`).
"""

from collections.abc import Sequence

from attrs import evolve, field, frozen

from ...ir import PRECISIONS, Attr, Names, Op, Program, Type, Value
from ...ir.placements import Step
from ...ops import OPS


@frozen
class Lines:
    """Appends to `ops`; `frame` has the program's dims and buckets."""

    frame: Program
    names: Names
    types: dict[str, Type]
    ops: list[Op] = field(factory=list[Op])

    def elsewhere(self) -> "Lines":
        """Ops of another body, in which the same names are known."""
        return evolve(self, ops=list[Op]())

    def value(self, like: str, type: Type) -> Value:
        """A new value, named after `like`."""
        value = Value(self.names.fresh(like), type)
        self.types[value.name] = type
        return value

    def write(self, kind: str, inputs: Sequence[str], like: str, **attrs: Attr) -> Value:
        """Appends an op of one result, which is named after `like`."""
        op = Op(kind, tuple(inputs), (), tuple(attrs.items()), span=self.frame.region.span)
        (type,) = OPS[kind].infer(self.frame, [self.types[name] for name in inputs], op)
        value = self.value(like, type)
        self.ops.append(evolve(op, outputs=(value,)))
        return value

    def coerce(self, value: Value, step: Step) -> Value:
        """Appends a coercion, unless it is over no axis."""
        if not step.axes:
            return value
        attrs: dict[str, Attr] = {"axes": step.axes, "from": step.source, "to": step.target}
        return self.write("coerce", [value.name], value.name, **attrs)

    def reduce(self, value: Value, step: Step) -> Value:
        """Appends a reduction of gradients, in the element type that the plan chooses for what is sent."""
        sent = PRECISIONS.get(self.frame.train.reduce or "", value.type.dtype)
        return self.cast(self.coerce(self.cast(value, sent), step), value.type.dtype) if step.axes else value

    def cast(self, value: Value, dtype: str) -> Value:
        """Appends a cast, unless it has the element type already."""
        return value if value.type.dtype == dtype else self.write("cast", [value.name], value.name, dtype=dtype)

    def give(self, kind: str, inputs: Sequence[str], results: Sequence[Value], **attrs: Attr) -> None:
        """Appends an op whose results have their names already."""
        op = Op(kind, tuple(inputs), tuple(results), tuple(attrs.items()), span=self.frame.region.span)
        self.ops.append(op)
        self.types.update((value.name, value.type) for value in results)
