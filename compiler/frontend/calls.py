"""Calls: the op that a name means, and the operand or attribute that each argument is."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from attrs import frozen

from ..ir import BATCH, FLOATS, Attr, Op
from ..ops import OPS, Attribute, OpDef, Operand, TypingError
from ..ops.dropout import DROPOUT, SITE
from ..syntax import tree
from ..syntax.diagnostics import Diagnostics, Note, PlanError, Unknown, did_you_mean, listing, wrong
from ..syntax.source import Span
from .arithmetic import evaluate
from .builder import UNKNOWN, Attrs, ModelBuilder
from .errors import check_count, check_dim
from .expert_rules import check_op, check_rows, check_user_op
from .other_names import (
    help_for_argument,
    help_for_call,
    help_for_choice,
    help_for_op,
    is_foreign_op,
)
from .parameters import Draws, Parameters, Scope
from .user_ops import UserOp

Arguments = tuple[list[tuple[Operand, tree.Expr]], list[tuple[Attribute, tree.Expr]]]
"""The operands and attributes that a call gives, each with its expression."""


def arguments(call: tree.Call, entry: OpDef, is_number: Callable[[tree.Expr], bool]) -> Arguments:
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


def check_ranges(entry: OpDef, op: Op, diagnostics: Diagnostics) -> None:
    """The numbers that an op has are in their ranges."""
    for attribute in entry.attributes:
        if not attribute.range:
            continue
        is_in_range, help = attribute.range
        value = dict(op.attrs).get(attribute.name)
        if isinstance(value, float) and not is_in_range(value):
            message = f"{op.kind}'s {attribute.name} is {value}"
            diagnostics.error("E0313", message, op.span, help=help)


@frozen
class Calls(ABC):
    """Writes calls of the language's ops and of `user_ops`; the base of `Expressions`, which
    writes their arguments.
    """

    _scope: Scope
    _parameters: Parameters
    _builder: ModelBuilder
    _draws: Draws
    _user_ops: Mapping[str, UserOp]
    _diagnostics: Diagnostics

    @abstractmethod
    def tensor(self, expr: tree.Expr, like: str = "") -> str:
        """The value that `expr` computes, named after `like` if it is a new one; UNKNOWN where
        it has a mistake.
        """

    def call(self, call: tree.Call, like: Sequence[str]) -> tuple[str, ...]:
        """The values that a call computes, as many as `like`, and named after these."""
        if user_op := self._user_ops.get(call.name.name):
            return self._user_call(call, user_op, like)
        entry = OPS.get(call.name.name)
        if entry is None or not entry.user_visible:
            raise self._no_op(call)
        if self._parameters.experts:
            check_op(call.name)
        operands, attrs = self.arguments(call, entry)
        self.require_rows(operands, call.span)
        values = dict(attrs)
        if entry is DROPOUT and not values["p"]:
            check_count(1, like, call.span)
            return operands
        # an op with a fraction that is not zero draws what it drops
        if any(values.get(attribute.name) for attribute in entry.attributes if attribute.share):
            draws, site = self._draws.next(call.span)
            operands, attrs = (*operands, draws), (*attrs, (SITE.name, site))
        return self._builder.several(entry.name, operands, attrs, call.span, like)

    def _no_op(self, call: tree.Call) -> PlanError:
        """The mistake of a call of an unknown op."""
        if call.name.name in self._diagnostics.doubtful:  # an op of the plan's own
            for argument in call.args:
                if not self._scope.is_number(argument):
                    self.tensor(argument)
        return wrong(
            "E0605",
            f"there is no op `{call.name}`",
            call.name.span,
            "not an op",
            self._instead(call),
        )

    def _instead(self, call: tree.Call) -> str:
        """Help for a call of an unknown op."""
        names = [argument.name for argument in call.args if isinstance(argument, tree.Name)]
        is_parameter = names and len(names) == len(call.args) and {*names} <= {*self._scope.dims}
        if is_parameter and not is_foreign_op(call.name.name):
            return (
                f"a parameter has brackets: `{call.name}[{', '.join(names)}]`, and `->` after"
                " dims that are summed"
            )
        names = [name for name, op in OPS.items() if op.user_visible]
        return help_for_op(call.name.name, [*names, *self._user_ops])

    def _user_call(self, call: tree.Call, user_op: UserOp, like: Sequence[str]) -> tuple[str, ...]:
        operands, numbers = self.arguments(call, user_op.entry)
        types = [self._builder.types[name] for name in operands]
        try:
            attrs = user_op.attributes(types, [float(str(value)) for _, value in numbers])
        except TypingError as error:
            raise wrong("E0307", str(error), call.span, "these dims do not fit") from None
        self.require_rows(operands, call.span)
        if self._parameters.experts:
            check_user_op(Op("call", operands, (), attrs, span=call.span), self._parameters.experts)
        names = [name or f"_{user_op.entry.name}" for name in like]
        return self._builder.several("call", operands, attrs, call.span, names)

    def require_rows(self, operands: Sequence[str], span: Span) -> None:
        """Raises PlanError where an operand in a route is not of rows."""
        if self._parameters.experts:
            for operand in operands:
                check_rows(self._builder.types[operand], span)

    def arguments(self, call: tree.Call, entry: OpDef) -> tuple[tuple[str, ...], Attrs]:
        """The operands and the attributes of a call of `entry`; attributes that have their
        default are left out.
        """
        operand_exprs, attributes = arguments(call, entry, self._scope.is_number)
        for operand, expr in operand_exprs:
            self._parameters.begin(expr, operand.init)
        values: list[str] = []
        for operand, expr in operand_exprs:
            # a plain x goes by the op that makes it
            stem = "" if operand.name == "x" else f"_{operand.name}"
            values.append(self.tensor(expr, stem))
        operands = tuple(values)
        before, attrs = self._diagnostics.count, dict[str, Attr]()
        with self._diagnostics.catch():
            for (operand, expr), value in zip(operand_exprs, operands, strict=True):
                if value != UNKNOWN:
                    self._check_kind(entry, operand, value, expr.span)
        for attribute, expr in attributes:
            with self._diagnostics.catch():
                attrs[attribute.name] = self._attribute(attribute, expr, operands[0])
        if UNKNOWN in operands or self._diagnostics.count > before:
            op = Op(entry.name, (), (), tuple(attrs.items()), span=call.span)
            check_ranges(entry, op, self._diagnostics)
            raise Unknown
        first = self._builder.types[operands[0]]
        for attribute in entry.attributes:
            if attribute.dims == "last" and attribute.name not in attrs:
                attrs[attribute.name] = first.dims[-1:]
        defaults = {attribute.name: attribute.default for attribute in entry.attributes}
        written = tuple((name, value) for name, value in attrs.items() if value != defaults[name])
        return operands, written

    def _check_kind(self, entry: OpDef, operand: Operand, value: str, span: Span) -> None:
        """Token ids go where they are looked up, labels into the loss, and numbers everywhere
        else.
        """
        input_name = ""
        if self._builder.types[value].dtype not in FLOATS:
            input_name = value
        if input_name != operand.input_name:
            wanted = f"the input `{operand.input_name}`" if operand.input_name else "numbers"
            help = f"it is written `{signature(entry)}`"
            raise wrong(
                "E0607", f"`{entry.name}` takes {wanted} here", span, f"`{operand.name}`", help
            )

    def _attribute(self, attribute: Attribute, expr: tree.Expr, first: str) -> Attr:
        """The value of an attribute; `first` is the first operand, whose dims it may name."""
        if attribute.dims == "any":
            return self._dim(expr, self._scope.dims)
        if attribute.dims == "several":
            if len(_items(expr)) < 2:
                raise wrong(
                    "E0307", "several dims are needed here", expr.span, "as in `[heads_dim, rest]`"
                )
            return tuple(self._dim(item, self._scope.dims) for item in _items(expr))
        if attribute.dims:
            return tuple(self._dim(item, self._builder.types[first].dims) for item in _items(expr))
        if attribute.choices:
            return _choice(expr, attribute.choices)
        return self._number(attribute, expr)

    def _number(self, attribute: Attribute, expr: tree.Expr) -> float:
        value = float(evaluate(expr, self._scope.numbers))
        if attribute.share and not 0 <= value < 1:
            label = f"`{attribute.name}` is {value:g}"
            raise wrong("E0610", "a fraction is at least 0 and less than 1", expr.span, label)
        if attribute.kinds != (int,):
            return value
        if value % 1:
            raise wrong(
                "E0313", f"`{attribute.name}` is a whole number", expr.span, f"is {value:g}"
            )
        return int(value)

    def _dim(self, expr: tree.Expr, dims: Sequence[str]) -> str:
        """A dim as an argument: one of `dims`, but not the one that counts samples."""
        if not isinstance(expr, tree.Name):
            help = f"dims go by name; here they are {listing(dims)}"
            raise wrong("E0307", "a dim is needed here", expr.span, "is not a dim", help)
        check_dim(expr, self._scope.dims)
        if expr.name not in dims:
            label, help = f"its dims are [{', '.join(dims)}]", did_you_mean(expr.name, dims)
            raise wrong("E0307", f"`{expr}` is not a dim of this operand", expr.span, label, help)
        if expr.name == BATCH:
            raise wrong(
                "E0307",
                "no op works along `batch`",
                expr.span,
                "samples are independent of each other",
            )
        return expr.name


def _choice(expr: tree.Expr, choices: Sequence[str]) -> str:
    """The choice that an expression names.  Raises PlanError where it is none."""
    help = ""
    if isinstance(expr, tree.Name):
        if expr.name in choices:
            return expr.name
        help = help_for_choice(expr.name, choices)
    label = f"one of {', '.join(f'`{choice}`' for choice in choices)}"
    raise wrong("E0608", "this is not one of the choices", expr.span, label, help)


def _items(expr: tree.Expr) -> tuple[tree.Expr, ...]:
    return expr.items if isinstance(expr, tree.List) else (expr,)
