"""Which operand or attribute of an op each argument of a call stands for.

Purpose: places, keys, and what may be left out.  Non-goals: what the arguments mean (`model`).
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from attrs import frozen

from ..ops import Attribute, OpDef, Operand
from ..syntax import tree
from ..syntax.diagnostics import Diagnostic, Note, PlanError
from ..syntax.source import Span
from .foreign import argument_elsewhere


@frozen
class Arguments:
    """The operands and attributes that a call gives, each with its expression."""

    operands: tuple[tuple[Operand, tree.Expr], ...]
    attributes: tuple[tuple[Attribute, tree.Expr], ...]


def arguments(call: tree.Call, entry: OpDef, is_number: Callable[[tree.Expr], bool]) -> Arguments:
    """The arguments of `call`, in the op's order.  Raises PlanError where they are too many, too few, or unknown."""
    further = (Operand(f"x{i}") for i in range(2, len(call.args) + 1) if entry.more)
    operands, attributes = (*_written(entry.operands), *further), _written(entry.attributes)
    places = [*(operand.name for operand in operands), *(attribute.name for attribute in attributes)]
    optional = {operand.name: operand for operand in operands if operand.optional}
    given: dict[str, tree.Expr] = {}
    left = list(places)
    for argument in call.args:
        while left and left[0] in optional and not _may_be(optional[left[0]], argument, is_number):
            left.pop(0)
        if not left:
            raise _unfit(entry, "has fewer arguments", argument.span, "one too many")
        given[left.pop(0)] = argument
    for setting in call.kwargs:
        key = setting.key
        if key.name not in places:
            help = argument_elsewhere(key.name, places)
            raise _unfit(entry, f"has no argument `{key}`", key.span, "not an argument", help)
        if first := given.get(key.name):
            notes = (Note(first.span, "given here"),)
            raise _unfit(entry, f"has one argument `{key}`", key.span, "given again", notes=notes)
        given[setting.key.name] = setting.value
    _check_complete(call, entry, operands, given)
    return Arguments(
        tuple((operand, given[operand.name]) for operand in operands if operand.name in given),
        tuple((attribute, given[attribute.name]) for attribute in attributes if attribute.name in given),
    )


T = TypeVar("T", Operand, Attribute)


def _written(each: Sequence[T]) -> tuple[T, ...]:
    """Without what the compiler gives."""
    return tuple(one for one in each if not one.implied)


def _may_be(operand: Operand, argument: tree.Expr, is_number: Callable[[tree.Expr], bool]) -> bool:
    """Whether an operand that may be left out is what stands in its place: an input by its name, or no number."""
    if operand.given:
        return isinstance(argument, tree.Name) and argument.name == operand.given
    return not is_number(argument)


def _check_complete(call: tree.Call, entry: OpDef, operands: tuple[Operand, ...], given: dict[str, tree.Expr]) -> None:
    """Nothing is missing; an operand that may be left out is so only together with those behind it."""
    last = max((i for i, operand in enumerate(operands) if operand.name in given), default=-1)
    needed = [operand.name for i, operand in enumerate(operands) if i < last or not operand.optional]
    needed += [a.name for a in _written(entry.attributes) if a.default is None and a.dims != "last"]
    for name in needed:
        if name not in given:
            choices = next((a.choices for a in entry.attributes if a.name == name), ())
            help = f"write {' or '.join(f'`{name}={choice}`' for choice in choices)}" if choices else ""
            raise _unfit(entry, f"needs an argument `{name}`", call.span, f"`{name}` is missing", help)


def signature(entry: OpDef) -> str:
    """How an op is written: `?` marks an operand that may be left out, `=` a default."""
    operands = [operand.name + "?" * operand.optional for operand in _written(entry.operands)]
    attributes = map(_attribute, _written(entry.attributes))
    return f"{entry.name}({', '.join([*operands, *(['…'] * entry.more), *attributes])})"


def _attribute(attribute: Attribute) -> str:
    default = "last" if attribute.dims == "last" else attribute.default
    shown = f"{default:g}" if isinstance(default, float) else default
    return attribute.name if shown is None else f"{attribute.name}={shown}"


def _unfit(entry: OpDef, what: str, span: Span, label: str, help: str = "", notes: tuple[Note, ...] = ()) -> PlanError:
    notes = (*notes, Note(None, f"it is written `{signature(entry)}`"))
    return PlanError([Diagnostic("E0606", f"`{entry.name}` {what}", span, label, notes, help)])
