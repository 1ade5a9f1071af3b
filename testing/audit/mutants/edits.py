"""Changes of one place of a program.

Purpose: an op or region exchanged for others that bind the same names, so that nothing else need
change.  Non-goals: legality: a mutant is evaluated as it is.
"""

from collections.abc import Callable, Iterator
from typing import TypeAlias

from attrs import evolve, frozen

from ....compiler.ir import Attr, Op, Program, Region, Stmt, Type, Value, walk_regions
from ....compiler.proof.pipeline.stage import Move
from ....compiler.schedules.actions import Schedule
from ....compiler.schedules.dependencies import Cell
from ....compiler.syntax.source import Span


@frozen
class Mutant:
    """A program that is wrong in one place: the kind of mistake, what it is in words, and the plan
    line.

    Or it is right, but what the cell `freed` of its rows takes is gone before, chunks are moved as
    `moved` says, or evaluation has other rows.
    """

    family: str
    what: str
    line: str
    program: Program
    freed: Cell | None = None
    moved: tuple[Move, ...] | None = None
    evaluation: Schedule | None = None


Edit: TypeAlias = Callable[[Program], Iterator[tuple[str, Span, Program]]]
"""All mutants of one kind: words, where, and the program."""


def replaced(program: Program, old: Stmt, *new: Stmt) -> Program:
    """The program with `new` in place of the statement `old`."""
    return evolve(program, region=_within(program.region, old, new))


def _within(region: Region, old: Stmt, new: tuple[Stmt, ...]) -> Region:
    body: list[Stmt] = []
    for stmt in region.body:
        if stmt is old:
            body.extend(new)
        else:
            body.append(_within(stmt, old, new) if isinstance(stmt, Region) else stmt)
    return evolve(region, body=tuple(body))


def regions(program: Program, *kinds: str) -> list[Region]:
    """All regions of some kinds, outer first."""
    return [region for region in walk_regions([program.region]) if region.kind in kinds]


def ops(program: Program, kind: str) -> list[Op]:
    """All ops of a kind."""
    return [op for op in program.ops if op.kind == kind]


def wide(program: Program) -> list[str]:
    """The axes of more than one rank."""
    return [axis.name for axis in program.axes if axis.size > 1]


def with_input(op: Op, index: int, name: str) -> Op:
    """The op reading another value."""
    return evolve(op, inputs=(*op.inputs[:index], name, *op.inputs[index + 1 :]))


def with_attrs(op: Op, **attrs: Attr) -> Op:
    """The op with other attributes; `source` and `target` are a coercion's ends."""
    words = {"source": "from", "target": "to"}
    return evolve(
        op, attrs=tuple((dict(op.attrs) | {words.get(k, k): v for k, v in attrs.items()}).items())
    )


def instead(op: Op, kind: str, /, **attrs: Attr) -> Op:
    """An op or fault of another kind that makes the same results of the same operands."""
    return evolve(op, kind=kind, attrs=tuple(attrs.items()))


def then(op: Op, kind: str, /, **attrs: Attr) -> tuple[Op, Op]:
    """The op, and after it another op or fault that changes its first result before anything
    reads it.
    """
    (value, *rest) = op.outputs
    own = aside(value)
    return evolve(op, outputs=(own, *rest)), Op(
        kind, (own.name,), (value,), tuple(attrs.items()), span=op.span
    )


def before(op: Op, index: int, type: Type, kind: str, /, **attrs: Attr) -> tuple[Op, Op]:
    """A fault that changes the op's operand `index`, which is of `type`, for it alone; and the
    op.
    """
    own = aside(Value(op.inputs[index], type))
    fault = Op(kind, (op.inputs[index],), (own,), tuple(attrs.items()), span=op.span)
    return fault, with_input(op, index, own.name)


def with_stack(region: Region, index: int, kind: str) -> tuple[Op, Region]:
    """A fault that changes the stack that the region's argument `index` slices; and the region."""
    arg = region.args[index]
    own = aside(Value(arg.source, arg.value.type.stack_along(region.dim)))
    args = (*region.args[:index], evolve(arg, source=own.name), *region.args[index + 1 :])
    return Op(kind, (arg.source,), (own,), span=region.span), evolve(region, args=args)


def aside(value: Value) -> Value:
    """The value by a name that no pass gives."""
    return evolve(value, name=f"{value.name}'")
