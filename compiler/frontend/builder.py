"""Writes the ops of a model as its statements are read."""

from collections.abc import Iterable, Sequence

from ..ir import Attr, Op, Program, Type, Value
from ..ops import OPS, OpDef, TypingError
from ..ops.builder import OpBuilder
from ..syntax.diagnostics import Unknown, wrong
from ..syntax.source import Span
from .errors import check_count

Attrs = tuple[tuple[str, Attr], ...]


UNKNOWN = ""
"""The name of a value that cannot be known, because of a mistake that has been reported."""


class _Types(dict[str, Type]):
    def __missing__(self, name: str) -> Type:
        assert name == UNKNOWN, f"resolve: no value `{name}`"
        raise Unknown


class ModelBuilder(OpBuilder):
    """The statements of the model, or of the repeat that is being read; mistakes are mistakes of
    the plan's author.

    Ops of values that are `UNKNOWN` raise Unknown.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.types = _Types(self.types)

    def op(self, kind: str, inputs: tuple[str, ...], attrs: Attrs, span: Span, like: str) -> str:
        """Writes an op of one result."""
        return self.several(kind, inputs, attrs, span, (like,))[0]

    def several(
        self, kind: str, inputs: tuple[str, ...], attrs: Attrs, span: Span, like: Sequence[str]
    ) -> tuple[str, ...]:
        """Writes an op; its results, named after `like` or the kind.

        Raises PlanError where its operands do not fit, or its results are not as many as `like`.
        """
        operands = [self.types[name] for name in inputs]
        try:
            op = Op(kind, inputs, (), attrs, span=span)
            types = OPS[kind].infer(self.program, operands, op)
        except TypingError as error:
            raise wrong("E0307", str(error), span, _operands_text(OPS[kind], operands)) from None
        check_count(len(types), like, span)
        stem = f"_{OPS[kind].stem or kind}"
        values: list[Value] = []
        for name, type in zip(like, types, strict=True):
            values.append(self.value(name or stem, type))
        self.append(Op(kind, inputs, tuple(values), attrs, span=span))
        return tuple(value.name for value in values)

    def reserve(self, names: Iterable[str]) -> None:
        """Reserves names: no value gets them."""
        for name in dict.fromkeys(names):
            self.names.fresh(name)


def _operands_text(entry: OpDef, types: Sequence[Type]) -> str:
    """The dims of operands, with names where a plan calls the op by its own."""
    operands: list[str] = []
    for i, type in enumerate(types):
        is_named = entry.user_visible and i < len(entry.operands)
        name = entry.operands[i].name if is_named else ""
        operands.append(f"{name}[{', '.join(type.dims)}]")
    *first, last = operands
    return f"{', '.join(first)} and {last}" if first else last
