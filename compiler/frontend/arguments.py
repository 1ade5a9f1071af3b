"""The arguments of a call: the operand or attribute that each one is."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from ..ops import Attribute, OpDef, Operand
from ..syntax import tree
from ..syntax.diagnostics import Note, PlanError, wrong
from ..syntax.source import Span
from .other_names import help_for_argument, help_for_call

Arguments = tuple[list[tuple[Operand, tree.Expr]], list[tuple[Attribute, tree.Expr]]]
"""The operands and attributes that a call gives, each with its expression."""


def get_arguments(
    call: tree.Call, entry: OpDef, is_number: Callable[[tree.Expr], bool]
) -> Arguments:
    """The arguments of `call`, in the op's order.

    Raises PlanError where they are too many, too few, or unknown.
    """
    operands, attributes = _operands(call, entry), _without_implied(entry.attributes)
    exprs_by_name = _by_place(call, entry, is_number)
    _add_by_keyword(call, entry, exprs_by_name)
    _check_complete(call, entry, operands, exprs_by_name, is_number)
    operand_exprs: list[tuple[Operand, tree.Expr]] = []
    for operand in operands:
        if operand.name in exprs_by_name:
            operand_exprs.append((operand, exprs_by_name[operand.name]))
    attribute_exprs: list[tuple[Attribute, tree.Expr]] = []
    for attribute in attributes:
        if attribute.name in exprs_by_name:
            attribute_exprs.append((attribute, exprs_by_name[attribute.name]))
    return operand_exprs, attribute_exprs


def _operands(call: tree.Call, entry: OpDef) -> tuple[Operand, ...]:
    """The operands that a plan writes; a variadic op has one for each further argument."""
    operands = [*_without_implied(entry.operands)]
    if entry.variadic:
        operands += [Operand(f"x{i}") for i in range(2, len(call.args) + 1)]
    return tuple(operands)


def _places(call: tree.Call, entry: OpDef) -> list[str]:
    """The names of a call's arguments in their order."""
    operands = [operand.name for operand in _operands(call, entry)]
    return operands + [attribute.name for attribute in _without_implied(entry.attributes)]


def _by_place(
    call: tree.Call, entry: OpDef, is_number: Callable[[tree.Expr], bool]
) -> dict[str, tree.Expr]:
    """The arguments without keywords, by name.  Raises PlanError where there are too many."""
    optional = {operand.name: operand for operand in _operands(call, entry) if operand.optional}
    exprs_by_name: dict[str, tree.Expr] = {}
    names = _places(call, entry)
    for argument in call.args:
        # an argument that the next optional operand cannot be is the one after it
        while (
            names and names[0] in optional and not _may_be(optional[names[0]], argument, is_number)
        ):
            names.pop(0)
        if not names:
            raise _unfit(entry, "takes fewer arguments", argument.span, "one too many")
        exprs_by_name[names.pop(0)] = argument
    return exprs_by_name


def _add_by_keyword(call: tree.Call, entry: OpDef, exprs_by_name: dict[str, tree.Expr]) -> None:
    """Adds the arguments with keywords.  Raises PlanError where one is unknown, or there twice."""
    places = _places(call, entry)
    for setting in call.kwargs:
        key = setting.key
        if key.name not in places:
            help = help_for_argument(entry.name, key.name, places)
            raise _unfit(entry, f"has no argument `{key}`", key.span, "not an argument", help)
        if first := exprs_by_name.get(key.name):
            notes = (Note(first.span, "the first value"),)
            raise _unfit(entry, f"takes `{key}` once", key.span, "the second value", notes=notes)
        exprs_by_name[key.name] = setting.value


T = TypeVar("T", Operand, Attribute)


def _without_implied(arguments: Sequence[T]) -> tuple[T, ...]:
    """The operands or attributes that a plan writes: the compiler gives the others."""
    return tuple(argument for argument in arguments if not argument.implied)


def _may_be(operand: Operand, argument: tree.Expr, is_number: Callable[[tree.Expr], bool]) -> bool:
    """Whether an optional operand is the one expected in its place: an input by its name, or no
    number.
    """
    if operand.input_name:
        return isinstance(argument, tree.Name) and argument.name == operand.input_name
    return not is_number(argument)


def _check_complete(
    call: tree.Call,
    entry: OpDef,
    operands: tuple[Operand, ...],
    exprs_by_name: dict[str, tree.Expr],
    is_number: Callable[[tree.Expr], bool],
) -> None:
    """Nothing is missing; an optional operand may be left out only together with the operands
    after it.

    A number in the place of a tensor says that this tensor is missing: `rmsnorm(x, eps)`.
    """
    last = -1
    for i, operand in enumerate(operands):
        if operand.name in exprs_by_name:
            last = i
    needed: list[str] = []
    for i, operand in enumerate(operands):
        if i < last or not operand.optional:
            needed.append(operand.name)
    tensors = {operand.name for operand in operands if operand.name in exprs_by_name}
    for attribute in _without_implied(entry.attributes):
        if attribute.default is None and attribute.dims != "last":
            needed.append(attribute.name)
    if all(name in exprs_by_name for name in needed):
        return
    missing = next(name for name in needed if name not in exprs_by_name)
    for name in needed:
        if name in tensors and is_number(exprs_by_name[name]):
            missing = name
            break
    help = _help_for_missing(entry, missing)
    label = f"`{missing}` is missing"
    raise _unfit(entry, f"needs an argument `{missing}`", call.span, label, help)


def _help_for_missing(entry: OpDef, name: str) -> str:
    for attribute in entry.attributes:
        if attribute.name == name and attribute.choices:
            return f"write {' or '.join(f'`{name}={choice}`' for choice in attribute.choices)}"
    help = help_for_call(entry.name)
    if name == "weight":
        return (
            f"{help}; for a weight that stays 1, an optimizer's group with `lr_scale = 0 "
            " weight_decay = 0`"
        )
    return help


def signature(entry: OpDef) -> str:
    """How an op is written: `?` marks an operand that may be left out, `=` a default."""
    arguments = [
        operand.name + "?" * operand.optional for operand in _without_implied(entry.operands)
    ]
    if entry.variadic:
        arguments.append("…")
    arguments += map(_attribute, _without_implied(entry.attributes))
    return f"{entry.name}({', '.join(arguments)})"


def _attribute(attribute: Attribute) -> str:
    default = "last" if attribute.dims == "last" else attribute.default
    if default is None:
        return attribute.name
    if isinstance(default, float):
        default = f"{default:g}"
    return f"{attribute.name}={default}"


def _unfit(
    entry: OpDef, what: str, span: Span, label: str, help: str = "", notes: tuple[Note, ...] = ()
) -> PlanError:
    notes = (*notes, Note(None, f"it is written `{signature(entry)}`"))
    return wrong("E0606", f"`{entry.name}` {what}", span, label, help, notes=notes)
