"""Calls: which op a name means, and what its operands and attributes are.

Non-goals: which argument stands for what (`arguments`); the expressions among them (`expressions`).
"""

from collections.abc import Callable, Mapping, Sequence

from ..ir import FLOATS, Attr, Type
from ..ops import OPS, Attribute, OpDef, Operand, TypingError
from ..ops.dropout import DROPOUT, SITE
from ..syntax import tree
from ..syntax.diagnostics import did_you_mean, listing
from ..syntax.source import Span
from .arguments import arguments, signature
from .arithmetic import evaluate
from .builder import Attrs, Writer
from .dropout_seeds import Draws
from .errors import check_count, wrong
from .foreign import op_elsewhere, value_elsewhere
from .parameters import Parameters
from .scope import Scope
from .user_ops import UserOp


class Calls:
    """Reads calls of the language's ops and of `user_ops`; `tensor` gives the value of an operand, and its name."""

    def __init__(
        self,
        scope: Scope,
        parameters: Parameters,
        writer: Writer,
        draws: Draws,
        user_ops: Mapping[str, UserOp],
        tensor: Callable[[tree.Expr, str], str],
    ) -> None:
        self._scope, self._parameters, self._writer, self._user_ops = scope, parameters, writer, user_ops
        self._draws, self._tensor = draws, tensor

    def call(self, call: tree.Call, like: Sequence[str]) -> tuple[str, ...]:
        """The values that a call computes, as many as `like`, after which they are named."""
        if own := self._user_ops.get(call.name.name):
            return self._user_call(call, own, like)
        entry = OPS.get(call.name.name)
        if entry is None or not entry.surface:
            raise wrong("E0605", f"there is no op `{call.name}`", call.name.span, "not an op", self._instead(call))
        operands, attrs = self._arguments(call, entry)
        if entry is DROPOUT and not dict(attrs)["p"]:
            check_count(1, like, call.span)
            return operands
        if any(dict(attrs).get(attribute.name) for attribute in entry.attributes if attribute.share):
            draws, site = self._draws.next(call.span)
            operands, attrs = (*operands, draws), (*attrs, (SITE.name, site))
        return self._writer.several(entry.name, operands, attrs, call.span, like)

    def _instead(self, call: tree.Call) -> str:
        """What is probably meant by a call of no op."""
        names = [argument.name for argument in call.args if isinstance(argument, tree.Name)]
        if names and len(names) == len(call.args) and {*names} <= {*self._scope.dims}:
            return f"a parameter has brackets: `{call.name}[{', '.join(names)}]`, with `->` after what `@` sums over"
        return op_elsewhere(call.name.name, [*(name for name, op in OPS.items() if op.surface), *self._user_ops])

    def _user_call(self, call: tree.Call, own: UserOp, like: Sequence[str]) -> tuple[str, ...]:
        operands, numbers = self._arguments(call, own.entry)
        types = [self._writer.types[name] for name in operands]
        try:
            attrs = own.attributes(types, [float(str(value)) for _, value in numbers])
        except TypingError as error:
            raise wrong("E0307", str(error), call.span, "these dims do not fit") from None
        names = [name or f"_{own.entry.name}" for name in like]
        return self._writer.several("call", operands, attrs, call.span, names)

    def _arguments(self, call: tree.Call, entry: OpDef) -> tuple[tuple[str, ...], Attrs]:
        given = arguments(call, entry, self._scope.is_number)
        for operand, expr in given.operands:
            self._parameters.begin(expr, operand.init)
        operands = tuple(self._tensor(expr, _like(operand.name)) for operand, expr in given.operands)
        for (operand, expr), value in zip(given.operands, operands, strict=True):
            self._check_kind(entry, operand, value, expr.span)
        first = self._writer.types[operands[0]]
        attrs = {a.name: self._attribute(a, expr, first) for a, expr in given.attributes}
        for attribute in entry.attributes:
            if attribute.dims == "last" and attribute.name not in attrs:
                attrs[attribute.name] = first.dims[-1:]
        defaults = {attribute.name: attribute.default for attribute in entry.attributes}
        return operands, tuple((name, value) for name, value in attrs.items() if value != defaults[name])

    def _check_kind(self, entry: OpDef, operand: Operand, value: str, span: Span) -> None:
        """Token ids go where they are looked up, labels into the loss, and numbers everywhere else."""
        given = value if self._writer.types[value].dtype not in FLOATS else ""
        if given != operand.given:
            wanted = f"the input `{operand.given}`" if operand.given else "numbers"
            help = f"it is written `{signature(entry)}`"
            raise wrong("E0607", f"`{entry.name}` takes {wanted} here", span, f"`{operand.name}`", help)

    def _attribute(self, attribute: Attribute, expr: tree.Expr, first: Type) -> Attr:
        """The value of an attribute; `first` is the type of the first operand, whose dims it may name."""
        if attribute.dims == "any":
            return self._dim(expr, self._scope.dims)
        if attribute.dims == "several":
            return self._several(expr)
        if attribute.dims:
            return tuple(self._dim(item, first.dims) for item in _items(expr))
        choices = attribute.choices
        if not choices:
            return self._number(attribute, expr)
        if isinstance(expr, tree.Name) and expr.name in choices:
            return expr.name
        label = f"one of {', '.join(f'`{choice}`' for choice in choices)}"
        help = value_elsewhere(expr.name) if isinstance(expr, tree.Name) else ""
        raise wrong("E0608", "this is not one of the choices", expr.span, label, help)

    def _several(self, expr: tree.Expr) -> tuple[str, ...]:
        if len(items := _items(expr)) < 2:
            raise wrong("E0307", "several dims are needed here", expr.span, "as in `[heads_dim, rest]`")
        return tuple(self._dim(item, self._scope.dims) for item in items)

    def _number(self, attribute: Attribute, expr: tree.Expr) -> float:
        value = float(evaluate(expr, self._scope.numbers))
        if attribute.share and not 0 <= value < 1:
            label = f"`{attribute.name}` is {value:g}"
            raise wrong("E0610", "a fraction is at least 0 and less than 1", expr.span, label)
        return value

    def _dim(self, expr: tree.Expr, known: Sequence[str]) -> str:
        """A dim as an argument: one of `known`, but not the one that counts samples."""
        if not isinstance(expr, tree.Name):
            help = f"dims go by name; here they are {listing(known)}"
            raise wrong("E0307", "a dim is needed here", expr.span, "is not a dim", help)
        self._scope.check_dim(expr)
        if expr.name not in known:
            label, help = f"its dims are [{', '.join(known)}]", did_you_mean(expr.name, known)
            raise wrong("E0307", f"`{expr}` is not a dim of this operand", expr.span, label, help)
        if expr.name == "batch":
            raise wrong("E0307", "no op works along `batch`", expr.span, "samples are independent of each other")
        return expr.name


def _items(expr: tree.Expr) -> tuple[tree.Expr, ...]:
    return expr.items if isinstance(expr, tree.List) else (expr,)


def _like(operand: str) -> str:
    """What an operand without a name of its own is called: `_q`; a plain x goes by the op that makes it."""
    return "" if operand == "x" else f"_{operand}"
