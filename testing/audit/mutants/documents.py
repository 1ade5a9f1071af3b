"""Mistakes in which document a token is of: attention that does not ask, or takes another
rank's.
"""

from collections.abc import Iterator
from typing import TypeAlias

from attrs import evolve

from ....compiler.ir import Kind, Op, Program
from ....compiler.ops.attention import documents_and_draws
from ....compiler.syntax.source import Span
from .edits import Edit, before, replaced, wide

Found: TypeAlias = Iterator[tuple[str, Span, Program]]


def _attended(program: Program) -> Iterator[tuple[Op, int]]:
    """Ops that take documents, and the place of these."""
    for op in program.ops:
        back = op.kind == "vjp"
        # behind dy, and before the result
        at, rest = (4, op.inputs[4:-1]) if back else (3, op.inputs[3:])
        if dict(op.attrs).get("of", op.kind) == "attention" and documents_and_draws(op, rest)[0]:
            yield op, at


def _unseen(program: Program) -> Found:
    for op, at in _attended(program):
        across = evolve(op, inputs=(*op.inputs[:at], *op.inputs[at + 1 :]))
        yield f"{op.outputs[0].name} made across documents", op.span, replaced(program, op, across)


def _others(program: Program) -> Found:
    for op, at in _attended(program):
        type = program.types[op.inputs[at]]
        for axis in type.axes_in(Kind.SHARDED):
            if axis in wide(program):
                shifted = before(op, at, type, "shifted", axes=(axis,))
                words = f"{op.outputs[0].name} made by the documents of another rank of {axis}"
                yield words, op.span, replaced(program, op, *shifted)


FAMILIES: dict[str, Edit] = {
    "seen across documents": _unseen,
    "documents of another rank": _others,
}
