"""Mistakes in what is dropped: another dropout's draws, another rank's or microbatch's, or the
same in each layer.
"""

from collections.abc import Iterator
from typing import TypeAlias

from ....compiler.ir import MICROBATCHES, Op, Program
from ....compiler.ops.dropout import SITE, are_draws
from ....compiler.syntax.source import Span
from .edits import Edit, before, regions, replaced, wide, with_attrs, with_stack

Found: TypeAlias = Iterator[tuple[str, Span, Program]]


def _drawing(program: Program) -> list[Op]:
    return [op for op in program.ops if SITE.name in dict(op.attrs)]


def _other_site(program: Program) -> Found:
    for op in _drawing(program):
        other = with_attrs(op, site=int(str(op.get(SITE.name))) + 1)
        yield (
            f"{op.outputs[0].name} made as another dropout is",
            op.span,
            replaced(program, op, other),
        )


def _other_rank(program: Program) -> Found:
    of = program.types
    for op in _drawing(program):
        at, type = next((i, of[name]) for i, name in enumerate(op.inputs) if are_draws(of[name]))
        for axis in type.axes_of("batch"):
            if axis in wide(program):
                shifted = before(op, at, type, "shifted", axes=(axis,))
                words = f"{op.outputs[0].name} made of the draws of another rank of {axis}"
                yield words, op.span, replaced(program, op, *shifted)


def _alike(program: Program) -> Found:
    """Iterations, or microbatches, that all draw as the first."""
    for region in regions(program, "repeat", MICROBATCHES):
        for i, arg in enumerate(region.args):
            if are_draws(arg.value.type) and program.size(region.dim) > 1:
                same = replaced(program, region, *with_stack(region, i, "alike"))
                yield f"all {region.dim} draw alike", region.span, same


FAMILIES: dict[str, Edit] = {
    "another dropout's draws": _other_site,
    "another rank's draws": _other_rank,
    "draws not drawn anew": _alike,
}
