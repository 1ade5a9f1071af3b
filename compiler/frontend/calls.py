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
from .other_names import help_for_argument, help_for_call, help_for_choice, help_for_op, is_known
from .parameters import Draws, Parameters, Scope
from .user_ops import UserOp

Given = tuple[list[tuple[Operand, tree.Expr]], list[tuple[Attribute, tree.Expr]]]
"""The operands and attributes that a call gives, each with its expression."""


def arguments(call: tree.Call, entry: OpDef, is_number: Callable[[tree.Expr], bool]) -> Given:
    """The arguments of `call`, in the op's order.

    Raises PlanError where they are too many, too few, or unknown.
    """
    further = (Operand(f"x{i}") for i in range(2, len(call.args) + 1) if entry.variadic)
    operands, attributes = (*_written(entry.operands), *further), _written(entry.attributes)
    places = [
        *(operand.name for operand in operands),
        *(attribute.name for attribute in attributes),
    ]
    optional = {operand.name: operand for operand in operands if operand.optional}
    exprs_by_name: dict[str, tree.Expr] = {}
    left = list(places)
    for argument in call.args:
        while left and left[0] in optional and not _may_be(optional[left[0]], argument, is_number):
            left.pop(0)
        if not left:
            raise _unfit(entry, "takes fewer arguments", argument.span, "one too many")
        exprs_by_name[left.pop(0)] = argument
    for setting in call.kwargs:
        key = setting.key
        if key.name not in places:
            help = help_for_argument(entry.name, key.name, places)
            raise _unfit(entry, f"has no argument `{key}`", key.span, "not an argument", help)
        if first := exprs_by_name.get(key.name):
            notes = (Note(first.span, "the first value"),)
            raise _unfit(entry, f"takes `{key}` once", key.span, "the second value", notes=notes)
        exprs_by_name[setting.key.name] = setting.value
    _check_complete(call, entry, operands, exprs_by_name, is_number)
    return (
        [(operand, exprs_by_name[operand.name]) for operand in operands if operand.name in exprs_by_name],
        [(attribute, exprs_by_name[attribute.name]) for attribute in attributes if attribute.name in exprs_by_name],
    )


T = TypeVar("T", Operand, Attribute)


def _written(each: Sequence[T]) -> tuple[T, ...]:
    """Without what the compiler gives."""
    return tuple(one for one in each if not one.implied)


def _may_be(operand: Operand, argument: tree.Expr, is_number: Callable[[tree.Expr], bool]) -> bool:
    """Whether an optional operand is the one expected in its place: an input by its name, or no
    number.
    """
    if operand.given:
        return isinstance(argument, tree.Name) and argument.name == operand.given
    return not is_number(argument)


def _check_complete(
    call: tree.Call,
    entry: OpDef,
    operands: tuple[Operand, ...],
    exprs_by_name: dict[str, tree.Expr],
    is_number: Callable[[tree.Expr], bool],
) -> None:
    """Nothing is missing; an optional operand may be left out only together with those after it.

    A number in the place of a tensor says that this tensor is missing: `rmsnorm(x, eps)`.
    """
    last = max((i for i, operand in enumerate(operands) if operand.name in exprs_by_name), default=-1)
    needed = [
        operand.name for i, operand in enumerate(operands) if i < last or not operand.optional
    ]
    needed += [a.name for a in _written(entry.attributes) if a.default is None and a.dims != "last"]
    tensors = {operand.name for operand in operands if operand.name in exprs_by_name}
    for name in needed:
        if name not in exprs_by_name:
            name = next(
                (operand for operand in needed if operand in tensors and is_number(exprs_by_name[operand])),
                name,
            )
            help = _help_for_missing(entry, name)
            raise _unfit(
                entry, f"needs an argument `{name}`", call.span, f"`{name}` is missing", help
            )


def _help_for_missing(entry: OpDef, name: str) -> str:
    choices = next(
        (attribute.choices for attribute in entry.attributes if attribute.name == name), ()
    )
    if choices:
        return f"write {' or '.join(f'`{name}={choice}`' for choice in choices)}"
    help = help_for_call(entry.name)
    if name == "weight":
        return (
            f"{help}; for a weight that stays 1, an optimizer's group with `lr_scale = 0 "
            " weight_decay = 0`"
        )
    return help


def signature(entry: OpDef) -> str:
    """How an op is written: `?` marks an operand that may be left out, `=` a default."""
    operands = [operand.name + "?" * operand.optional for operand in _written(entry.operands)]
    attributes = map(_attribute, _written(entry.attributes))
    return f"{entry.name}({', '.join([*operands, *(['…'] * entry.variadic), *attributes])})"


def _attribute(attribute: Attribute) -> str:
    default = "last" if attribute.dims == "last" else attribute.default
    shown = f"{default:g}" if isinstance(default, float) else default
    return attribute.name if shown is None else f"{attribute.name}={shown}"


def _unfit(
    entry: OpDef, what: str, span: Span, label: str, help: str = "", notes: tuple[Note, ...] = ()
) -> PlanError:
    notes = (*notes, Note(None, f"it is written `{signature(entry)}`"))
    return wrong("E0606", f"`{entry.name}` {what}", span, label, help, notes=notes)


def check_ranges(entry: OpDef, op: Op, diagnostics: Diagnostics) -> None:
    """The numbers that an op has are in their ranges."""
    for name, (holds, help) in ((each.name, each.range) for each in entry.attributes if each.range):
        value = dict(op.attrs).get(name)
        if isinstance(value, float) and not holds(value):
            diagnostics.error("E0313", f"{op.kind}'s {name} is {value}", op.span, help=help)


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
        """The values that a call computes, as many as `like`, after which they are named."""
        if user_op := self._user_ops.get(call.name.name):
            return self._user_call(call, user_op, like)
        entry = OPS.get(call.name.name)
        if entry is None or not entry.user_visible:
            if call.name.name in self._diagnostics.doubtful:  # an op of the plan's own
                for argument in (each for each in call.args if not self._scope.is_number(each)):
                    self.tensor(argument)
            raise wrong(
                "E0605",
                f"there is no op `{call.name}`",
                call.name.span,
                "not an op",
                self._instead(call),
            )
        if self._parameters.experts:
            check_op(call.name)
        operands, attrs = self.arguments(call, entry)
        self.require_rows(operands, call.span)
        if entry is DROPOUT and not dict(attrs)["p"]:
            check_count(1, like, call.span)
            return operands
        if any(
            dict(attrs).get(attribute.name) for attribute in entry.attributes if attribute.share
        ):
            draws, site = self._draws.next(call.span)
            operands, attrs = (*operands, draws), (*attrs, (SITE.name, site))
        return self._builder.several(entry.name, operands, attrs, call.span, like)

    def _instead(self, call: tree.Call) -> str:
        """Help for a call of an unknown op."""
        names = [argument.name for argument in call.args if isinstance(argument, tree.Name)]
        is_parameter = names and len(names) == len(call.args) and {*names} <= {*self._scope.dims}
        if is_parameter and not is_known(call.name.name):
            return (
                f"a parameter has brackets: `{call.name}[{', '.join(names)}]`, and `->` after"
                " dims that are summed"
            )
        return help_for_op(
            call.name.name,
            [*(name for name, op in OPS.items() if op.user_visible), *self._user_ops],
        )

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
        """In a route all operands are rows."""
        for operand in operands if self._parameters.experts else ():
            check_rows(self._builder.types[operand], span)

    def arguments(self, call: tree.Call, entry: OpDef) -> tuple[tuple[str, ...], Attrs]:
        """The operands and the attributes of a call of `entry`; attributes that have their
        default are left out.
        """
        operand_exprs, attributes = arguments(call, entry, self._scope.is_number)
        for operand, expr in operand_exprs:
            self._parameters.begin(expr, operand.init)
        stems = [
            (expr, "" if operand.name == "x" else f"_{operand.name}") for operand, expr in operand_exprs
        ]
        # a plain x goes by the op that makes it
        operands = tuple(self.tensor(expr, stem) for expr, stem in stems)
        before, attrs = self._diagnostics.count, dict[str, Attr]()
        with self._diagnostics.catch():
            for (operand, expr), value in zip(operand_exprs, operands, strict=True):
                if value != UNKNOWN:
                    self._check_kind(entry, operand, value, expr.span)
        for attribute, expr in attributes:
            with self._diagnostics.catch():
                attrs[attribute.name] = self._attribute(attribute, expr, operands[0])
        if UNKNOWN in operands or self._diagnostics.count > before:
            check_ranges(
                entry, Op(entry.name, (), (), tuple(attrs.items()), span=call.span), self._diagnostics
            )
            raise Unknown
        first = self._builder.types[operands[0]]
        for attribute in entry.attributes:
            if attribute.dims == "last" and attribute.name not in attrs:
                attrs[attribute.name] = first.dims[-1:]
        defaults = {attribute.name: attribute.default for attribute in entry.attributes}
        return operands, tuple(
            (name, value) for name, value in attrs.items() if value != defaults[name]
        )

    def _check_kind(self, entry: OpDef, operand: Operand, value: str, span: Span) -> None:
        """Token ids go where they are looked up, labels into the loss, and numbers everywhere
        else.
        """
        input_name = value if self._builder.types[value].dtype not in FLOATS else ""
        if input_name != operand.given:
            wanted = f"the input `{operand.given}`" if operand.given else "numbers"
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
        choices = attribute.choices
        if not choices:
            return self._number(attribute, expr)
        if isinstance(expr, tree.Name) and expr.name in choices:
            return expr.name
        label = f"one of {', '.join(f'`{choice}`' for choice in choices)}"
        help = help_for_choice(expr.name, choices) if isinstance(expr, tree.Name) else ""
        raise wrong("E0608", "this is not one of the choices", expr.span, label, help)

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


def _items(expr: tree.Expr) -> tuple[tree.Expr, ...]:
    return expr.items if isinstance(expr, tree.List) else (expr,)
