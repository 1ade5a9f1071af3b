"""Mistakes in which document a token is of: attention that does not ask, or takes another rank's."""

from collections.abc import Iterator
from typing import TypeAlias

from attrs import evolve

from ....compiler.ir import Kind, Op, Program, types, walk
from ....compiler.ops.attention import documents_and_draws
from ....compiler.syntax.source import Span
from .edits import Edit, before, replaced, wide

Found: TypeAlias = Iterator[tuple[str, Span, Program]]

PLACES = {"attention": 3, "attention_dx": 5}
"""Where documents stand among an op's operands, if it has any."""


def _attended(program: Program) -> Iterator[tuple[Op, int]]:
    """Ops that take documents, and the place of these."""
    for op in walk(program.region.body):
        at = PLACES.get(op.kind)
        if at and documents_and_draws(op, op.inputs[at:])[0]:
            yield op, at


def _unseen(program: Program) -> Found:
    for op, at in _attended(program):
        across = evolve(op, inputs=(*op.inputs[:at], *op.inputs[at + 1 :]))
        yield f"{op.outputs[0].name} made across documents", op.span, replaced(program, op, across)


def _others(program: Program) -> Found:
    for op, at in _attended(program):
        type = types(program)[op.inputs[at]]
        for axis in type.axes_in(Kind.SHARDED):
            if axis in wide(program):
                shifted = before(op, at, type, "shifted", axes=(axis,))
                words = f"{op.outputs[0].name} made by the documents of another rank of {axis}"
                yield words, op.span, replaced(program, op, *shifted)


FAMILIES: dict[str, Edit] = {
    "seen across documents": _unseen,
    "documents of another rank": _others,
}
