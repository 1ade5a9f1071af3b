"""Mistakes in sums over the ranks of a pipeline's stages: parameters of which several ranks have a
copy.

Non-goals: sums that are left out, or over other axes (`coercions`).
"""

from collections.abc import Iterator
from typing import TypeAlias

from attrs import evolve

from ....compiler.ir import Op, Program
from ....compiler.syntax.source import Span
from .edits import Edit, ops, replaced

Found: TypeAlias = Iterator[tuple[str, Span, Program]]


def _counted_by_all(program: Program) -> Found:
    """In the norm each rank that holds a copy counts it."""
    for op in ops(program, "sum_squares"):
        if op.names("once"):
            words = f"{', '.join(op.inputs)} counted in the norm by all that hold it"
            yield words, op.span, replaced(program, op, _lacking(op, "once"))


def _among_all(program: Program) -> Found:
    """The gradient of a copy is summed over ranks that hold none too."""
    for op in ops(program, "coerce"):
        if op.names("among"):
            words = f"{op.inputs[0]} summed over ranks that do not hold it"
            yield words, op.span, replaced(program, op, _lacking(op, "among"))


def _lacking(op: Op, key: str) -> Op:
    return evolve(op, attrs=tuple((name, value) for name, value in op.attrs if name != key))


FAMILIES: dict[str, Edit] = {
    "copies of several stages counted twice": _counted_by_all,
    "summed over stages without a copy": _among_all,
}
