"""Turns a model's statements into ops without placements: the single-device program.

Purpose: names, dims and arguments are checked here, at their place in the plan.
Non-goals: anything distributed.
"""

import sys
from collections.abc import Iterator, Sequence

from attrs import evolve, frozen

from ... import syntax
from ...diagnostics import Diagnostic, Note, PlanError, did_you_mean
from ...ir import (
    FLOATS,
    Arg,
    Attr,
    Enter,
    Init,
    Leave,
    Names,
    Op,
    Param,
    Program,
    Region,
    Stmt,
    Type,
    Value,
    Yield,
)
from ...ops import OPS, Attribute, OpDef, Operand, TypingError
from ...source import Span
from .arguments import arguments
from .arithmetic import Scalar, apply, evaluate, exact
from .initial import initialised
from .mistakes import check_name, check_not_data, wrong
from .user_ops import UserOp

STEMS = {
    "contract": "y",
    "attention": "o",
    "rmsnorm": "n",
    "layernorm": "n",
    "softmax": "p",
    "silu": "g",
    "relu": "g",
    "gelu": "g",
    "scale": "y",
    "shift": "y",
    "div": "y",
    "mul": "g",
    "add": "y",
    "embedding": "e",
    "rope": "r",
}
"""What results without a name in the plan are called, after the underscore that marks them."""


MOST_OPERANDS = 256
"""The most operands of one expression."""


@frozen
class Built:
    """The model's region and its parameters."""

    region: Region
    params: tuple[Param, ...]


def build(
    model: syntax.Model, frame: Program, scope: dict[str, Scalar], ops: dict[str, UserOp], dtype: str, stored: str
) -> Built:
    """The model as a region; `frame` has the dims, `dtype` is that of activations, `stored` that of parameters."""
    return _Builder(model, frame, scope, ops, dtype, stored).build()


class _Builder:
    def __init__(
        self,
        model: syntax.Model,
        frame: Program,
        scope: dict[str, Scalar],
        ops: dict[str, UserOp],
        dtype: str,
        stored: str,
    ) -> None:
        self._model, self._frame, self._scope, self._dtype, self._stored = model, frame, scope, dtype, stored
        self._user_ops = ops
        self._dims = {dim.name for dim in frame.dims}
        self._names = Names()
        self._types: dict[str, Type] = {}
        self._env: dict[str, str] = {}  # what a name in the plan now stands for
        self._declared: dict[str, syntax.Name] = {}  # inputs and parameters, where they were declared
        self._params: dict[str, Param] = {}
        self._leaves: dict[str, Op] = {}
        self._roles: dict[str, str] = {}  # how a parameter begins by its first use, if that says so
        self._repeats: list[_Repeat] = []
        self._stacked: set[str] = set()  # parameters declared inside a repeat
        self._out: list[Stmt] = []

    def build(self) -> Built:
        check_name(self._model.name)
        self._check_inputs()
        args = tuple(self._input(given) for given in self._model.inputs)
        for item in self._model.body:
            if isinstance(item, syntax.Bind | syntax.Repeat):
                self._statement(item)
        loss = self._loss()
        region = Region(
            "model",
            (*self._leaves.values(), *self._out),
            args,
            (Yield(loss, Leave.LAST),),
            span=self._model.span,
        )
        return Built(region, tuple(initialised(self._model, self._params, self._roles, self._scope)))

    def _check_inputs(self) -> None:
        """The runtime deals out tokens and the labels that follow them."""
        written = [(given.name.name, tuple(map(str, given.dims))) for given in self._model.inputs]
        if written != [(name, ("batch", "seq")) for name in ("tokens", "labels")]:
            span = self._model.inputs[0].span.to(self._model.inputs[-1].span)
            help = "write `(tokens[batch, seq], labels[batch, seq])`"
            raise wrong("E0213", "a model is given tokens and labels", span, "other inputs", help)

    def _input(self, given: syntax.Input) -> Arg:
        for dim in given.dims:
            self._known_dim(dim)
        value = Value(self._names.fresh(given.name.name), Type("i64", tuple(map(str, given.dims))))
        self._declare(given.name)
        self._env[given.name.name] = value.name
        self._types[value.name] = value.type
        return Arg(value, value.name, Enter.EACH)

    def _loss(self) -> str:
        loss = self._env.get("loss")
        if loss is None:
            help = "end the model with `loss = cross_entropy(logits, labels)`"
            raise PlanError([Diagnostic("E0206", "this model computes no `loss`", self._model.name.span, help=help)])
        made_by = {op.outputs[0].name: op for op in self._out if isinstance(op, Op)}
        pending = [loss]
        while pending:  # what is summed over microbatches and ranks must be a sum over tokens
            op = made_by.get(pending.pop())
            if op and op.kind == "add":
                pending += op.inputs
            elif not op or op.kind != "cross_entropy":
                help = "the loss is `cross_entropy(…)`, or a sum of such outside of repeats"
                span = op.span if op else self._model.name.span
                raise PlanError([Diagnostic("E0214", "`loss` is not a sum of token losses", span, help=help)])
        return loss

    # ---- statements

    def _statement(self, item: syntax.Statement) -> None:
        if isinstance(item, syntax.Repeat):
            self._repeat(item)
            return
        if len(item.names) != 1:
            raise wrong("E0602", "no op of the language has several results", item.names[1].span, "a second name")
        (name,) = item.names
        check_name(name)
        if first := self._declared.get(name.name):
            notes = (Note(first.span, "declared here"),)
            raise PlanError(
                [Diagnostic("E0207", f"`{name}` is an input or a parameter", name.span, "bound again", notes)]
            )
        self._env[name.name] = self._tensor(item.expr, name.name)

    def _repeat(self, item: syntax.Repeat) -> None:
        self._known_dim(item.dim)
        check_not_data(item.dim, "a repeat")
        outer_env, outer_out = dict(self._env), self._out
        assigned = dict.fromkeys(name.name for name in _assigned(item) if name.name in self._env)
        repeat = _Repeat(item.dim.name, [])
        self._out = []
        carries = [self._carry(name) for name in assigned]
        self._repeats.append(repeat)
        for statement in item.body:
            self._statement(statement)
        self._repeats.pop()
        ends = tuple(Yield(self._env[name], Leave.LAST) for name in assigned)
        for name, arg, end in zip(assigned, carries, ends, strict=True):
            self._same_type(name, arg.value.type, self._types[end.name], item)
        results = tuple(self._value(name, self._types[end.name]) for name, end in zip(assigned, ends, strict=True))
        args = (*carries, *repeat.slices)
        region = Region("repeat", tuple(self._out), args, ends, results, item.dim.name, span=item.span)
        self._out = [*outer_out, region]
        self._env = outer_env | {name: value.name for name, value in zip(assigned, results, strict=True)}

    def _carry(self, name: str) -> Arg:
        source = self._env[name]
        value = self._value(name, self._types[source])
        self._env[name] = value.name
        return Arg(value, source, Enter.CARRY)

    def _same_type(self, name: str, before: Type, after: Type, item: syntax.Repeat) -> None:
        if before != after:
            label = f"enters as {_dims(before)}, leaves as {_dims(after)}"
            raise wrong("E0305", f"`{name}` changes its dims in `repeat {item.dim}`", item.dim.span, label)

    # ---- expressions

    def _tensor(self, expr: syntax.Expr, like: str = "") -> str:
        """The value that `expr` computes."""
        match expr:
            case syntax.Name():
                return self._named(expr)
            case syntax.ParamUse():
                return self._parameter(expr)
            case syntax.Call():
                return self._call(expr, like)
            case syntax.Binary():
                return self._chain(expr, like)
            case syntax.Negative(inner) if not self._is_number(inner):
                return self._by("scale", self._tensor(inner), -1, expr, like)
            case _:
                raise wrong("E0603", "a tensor is needed here", expr.span, "is not a tensor")

    def _named(self, name: syntax.Name) -> str:
        if name.name in self._env:
            return self._env[name.name]
        if name.name in self._params:
            return self._use(self._params[name.name], name.span)
        if name.name in self._scope:
            raise wrong("E0603", "a tensor is needed here", name.span, f"`{name}` is a number")
        known = [*self._env, *self._params]
        raise wrong("E0201", f"`{name}` is not defined", name.span, "not known here", did_you_mean(name.name, known))

    def _chain(self, expr: syntax.Binary, like: str) -> str:
        """Walks down the left side with a loop, since chains may be long."""
        links: list[syntax.Binary] = []
        left: syntax.Expr = expr
        while isinstance(left, syntax.Binary):
            links.append(left)
            left = left.left
        if len(links) >= MOST_OPERANDS:
            message = f"an expression of more than {MOST_OPERANDS} operands"
            raise wrong("E0102", message, expr.span, help="name parts of it")
        value = self._either(left)
        for link in reversed(links):
            value = self._binary(link, value, self._either(link.right), like if link is expr else "")
        if not isinstance(value, str):
            raise wrong("E0603", "a tensor is needed here", expr.span, "is a number")
        return value

    def _either(self, expr: syntax.Expr) -> str | Scalar:
        """The value that `expr` computes, or the number that it is."""
        return evaluate(expr, self._scope) if self._is_number(expr) else self._tensor(expr)

    def _is_number(self, expr: syntax.Expr) -> bool:
        """Whether all that an expression is made of are numbers."""
        pending = [expr]
        while pending:
            match pending.pop():
                case syntax.Number():
                    pass
                case syntax.Name(name) if name in self._scope and name not in self._env:
                    pass
                case syntax.Negative(inner) | syntax.Call(syntax.Name("sqrt"), (inner,), ()):
                    pending.append(inner)
                case syntax.Binary(_, left, right):
                    pending += (left, right)
                case _:
                    return False
        return True

    def _binary(self, link: syntax.Binary, left: str | Scalar, right: str | Scalar, like: str) -> str | Scalar:
        match left, link.op, right:
            case str(), "@", str():
                over = self._contracted(link, left, right)
                return self._op("contract", (left, right), (("over", over),), link.span, like)
            case str(), "+", str():
                return self._op("add", (left, right), (), link.span, like)
            case str(), "-", str():
                return self._op("add", (left, self._by("scale", right, -1, link)), (), link.span, like)
            case str(), "*", str():
                return self._op("mul", (left, right), (), link.span, like)
            case str(), "/", str():
                return self._op("div", (left, right), (), link.span, like)
            case _:
                return self._with_number(link, left, right, like)

    def _with_number(self, link: syntax.Binary, left: str | Scalar, right: str | Scalar, like: str) -> str | Scalar:
        """A sum, difference, product or quotient of which a side at least is a number."""
        match left, link.op, right:
            case str(), "+", _ if not isinstance(right, str):
                return self._by("shift", left, right, link, like)
            case str(), "-", _ if not isinstance(right, str):
                return self._by("shift", left, -right, link, like)
            case str(), "*", _ if not isinstance(right, str):
                return self._by("scale", left, right, link, like)
            case str(), "/", _ if not isinstance(right, str) and right:
                return self._by("scale", left, 1 / exact(right), link, like)
            case _, "+", str() if not isinstance(left, str):
                return self._by("shift", right, left, link, like)
            case _, "-", str() if not isinstance(left, str):
                return self._by("shift", self._by("scale", right, -1, link), left, link, like)
            case _, "*", str() if not isinstance(left, str):
                return self._by("scale", right, left, link, like)
            case _ if not isinstance(left, str) and not isinstance(right, str):
                return apply(link, left, right)
            case _:
                help = "a tensor may be multiplied by a number, divided by one that is not 0, and added to one"
                raise wrong("E0604", f"`{link.op}` does not work on these", link.span, "a tensor and a number", help)

    def _by(self, kind: str, value: str, by: Scalar, at: syntax.Expr, like: str = "") -> str:
        """A tensor scaled or shifted by a number."""
        if abs(by) > sys.float_info.max:
            raise wrong("E0302", "a number that is too large", at.span, "beyond 64-bit floating point")
        return self._op(kind, (value,), (("by", float(by)),), at.span, like)

    def _contracted(self, link: syntax.Binary, left: str, right: str) -> tuple[str, ...]:
        """The dims that `@` sums over: those before the arrow, or all that both operands have."""
        x, w = self._types[left], self._types[right]
        arrow = tuple(map(str, link.right.ins)) if isinstance(link.right, syntax.ParamUse) else ()
        over = arrow or tuple(dim for dim in x.dims if dim in w.dims)
        if over and x.dims[-len(over) :] == over == w.dims[-len(over) :]:
            self._make_matrix(link.right, len(over))
            return over
        label = f"[{', '.join(x.dims)}] @ [{', '.join(w.dims)}]"
        help = "`@` sums over the last dims of its left side, which the right side must have"
        raise wrong("E0306", "these operands have no product", link.span, label, help)

    def _make_matrix(self, right: syntax.Expr, inner: int) -> None:
        if isinstance(right, syntax.ParamUse | syntax.Name):
            name = right.name.name if isinstance(right, syntax.ParamUse) else right.name
            if param := self._params.get(name):
                self._params[name] = evolve(param, inner=inner)

    def _call(self, call: syntax.Call, like: str) -> str:
        if own := self._user_ops.get(call.name.name):
            return self._user_call(call, own, like)
        entry = OPS.get(call.name.name)
        if entry is None or not entry.surface:
            known = [*(name for name, op in OPS.items() if op.surface), *self._user_ops]
            raise wrong(
                "E0605",
                f"there is no op `{call.name}`",
                call.name.span,
                "not an op",
                did_you_mean(call.name.name, known),
            )
        operands, attrs = self._arguments(call, entry)
        return self._op(entry.name, operands, attrs, call.span, like)

    def _user_call(self, call: syntax.Call, own: UserOp, like: str) -> str:
        operands, numbers = self._arguments(call, own.entry)
        try:
            attrs = own.attributes(
                [self._types[name] for name in operands], [float(str(value)) for _, value in numbers]
            )
        except TypingError as error:
            raise wrong("E0307", str(error), call.span, "these dims do not fit") from None
        return self._op("call", operands, attrs, call.span, like or f"_{own.entry.name}")

    def _arguments(self, call: syntax.Call, entry: OpDef) -> tuple[tuple[str, ...], tuple[tuple[str, Attr], ...]]:
        given = arguments(call, entry, self._is_number)
        for operand, expr in given.operands:
            self._begin(expr, operand.init)
        operands = tuple(self._tensor(expr, _like(operand.name)) for operand, expr in given.operands)
        for (operand, expr), value in zip(given.operands, operands, strict=True):
            self._check_kind(entry, operand, value, expr.span)
        attrs = {a.name: self._attribute(a, expr, self._types[operands[0]]) for a, expr in given.attributes}
        for attribute in entry.attributes:
            if attribute.dims == "last" and attribute.name not in attrs:
                attrs[attribute.name] = self._types[operands[0]].dims[-1:]
        defaults = {attribute.name: attribute.default for attribute in entry.attributes}
        return operands, tuple((name, value) for name, value in attrs.items() if value != defaults[name])

    def _check_kind(self, entry: OpDef, operand: Operand, value: str, span: Span) -> None:
        """Token ids go where they are looked up, labels into the loss, and numbers everywhere else."""
        given = value if self._types[value].dtype not in FLOATS else ""
        if given != operand.given:
            wanted = f"the input `{operand.given}`" if operand.given else "numbers"
            raise wrong("E0607", f"`{entry.name}` takes {wanted} here", span, f"`{operand.name}`")

    def _begin(self, expr: syntax.Expr, init: str) -> None:
        if init and isinstance(expr, syntax.ParamUse):
            self._roles.setdefault(expr.name.name, init)

    def _attribute(self, attribute: Attribute, expr: syntax.Expr, first: Type) -> Attr:
        """The value of an attribute; `first` is the type of the first operand, whose dims it may name."""
        if attribute.dims == "any":
            return self._dim(expr, sorted(self._dims))
        if attribute.dims:
            items = expr.items if isinstance(expr, syntax.List) else (expr,)
            return tuple(self._dim(item, first.dims) for item in items)
        choices = attribute.choices
        if not choices:
            return float(evaluate(expr, self._scope))
        if isinstance(expr, syntax.Name) and expr.name in choices:
            return expr.name
        raise wrong(
            "E0608", "this is not one of the choices", expr.span, f"one of {', '.join(f'`{c}`' for c in choices)}"
        )

    def _dim(self, expr: syntax.Expr, known: Sequence[str]) -> str:
        """A dim as an argument: one of `known`, but not the one that counts samples."""
        if not isinstance(expr, syntax.Name):
            raise wrong("E0307", "a dim is needed here", expr.span, "is not a dim")
        self._known_dim(expr)
        if expr.name not in known:
            label, help = f"its dims are [{', '.join(known)}]", did_you_mean(expr.name, known)
            raise wrong("E0307", f"`{expr}` is not a dim of this operand", expr.span, label, help)
        if expr.name == "batch":
            raise wrong("E0307", "no op works along `batch`", expr.span, "samples do not know of each other")
        return expr.name

    def _op(
        self, kind: str, inputs: tuple[str, ...], attrs: tuple[tuple[str, Attr], ...], span: Span, like: str
    ) -> str:
        op = Op(kind, inputs, (), attrs, span=span)
        try:
            (type,) = OPS[kind].infer(self._frame, [self._types[name] for name in inputs], op)
        except TypingError as error:
            raise wrong("E0307", str(error), span, "these dims do not fit") from None
        value = self._value(like or f"_{STEMS.get(kind, kind)}", type)
        self._out.append(evolve(op, outputs=(value,)))
        return value.name

    # ---- parameters

    def _parameter(self, use: syntax.ParamUse) -> str:
        name = use.name.name
        if first := self._declared.get(name):
            help = f"write `{name}` without brackets to use it again"
            notes = (Note(first.span, "declared here"),)
            raise PlanError([Diagnostic("E0208", f"`{name}` is declared twice", use.span, "again", notes, help)])
        if name in self._env:
            raise wrong("E0207", f"`{name}` is already a value", use.name.span, "declared as a parameter here")
        for dim in (*use.outs, *use.ins):
            self._known_dim(dim)
            if dim.name != "seq":
                check_not_data(dim, "a parameter")
        check_name(use.name)
        self._declare(use.name)
        stack = tuple(repeat.dim for repeat in self._repeats)
        dims = (*stack, *map(str, use.outs), *map(str, use.ins))
        if twice := [dim for dim in use.outs + use.ins if dims.count(dim.name) > 1]:
            raise wrong("E0308", f"`{name}` has dim `{twice[-1]}` twice", twice[-1].span, "again")
        self._names.fresh(name)
        param = Param(name, Type(self._stored, dims), len(stack), len(use.ins), Init(""), span=use.span)
        self._params[name] = param
        leaf = self._value(name, evolve(param.type, dtype=self._dtype))
        self._leaves[name] = Op("leaf", (name,), (leaf,), (), span=use.span)
        self._stacked.update([name] if stack else [])
        for repeat in self._repeats:
            slice = self._value(name, leaf.type.inside(repeat.dim))
            repeat.slices.append(Arg(slice, leaf.name, Enter.EACH))
            repeat.holds[name] = slice.name
            leaf = slice
        return leaf.name

    def _use(self, param: Param, span: Span) -> str:
        """The value of a parameter declared before: its slice in the repeat that declared it."""
        for repeat in reversed(self._repeats):
            if param.name in repeat.holds:
                return repeat.holds[param.name]
        if param.name in self._stacked:
            notes = (Note(param.span, "declared here"),)
            raise PlanError(
                [Diagnostic("E0209", f"`{param.name}` has one value per repetition", span, "used outside", notes)]
            )
        return self._leaves[param.name].outputs[0].name

    # ---- names

    def _declare(self, name: syntax.Name) -> None:
        self._declared[name.name] = name

    def _known_dim(self, dim: syntax.Name) -> None:
        if dim.name not in self._dims:
            raise wrong(
                "E0201", f"there is no dim `{dim}`", dim.span, "not a dim", did_you_mean(dim.name, sorted(self._dims))
            )

    def _value(self, like: str, type: Type) -> Value:
        value = Value(self._names.fresh(like), type)
        self._types[value.name] = type
        return value


class _Repeat:
    """A repeat under construction: the slices of the parameters declared in it."""

    def __init__(self, dim: str, slices: list[Arg]) -> None:
        self.dim, self.slices = dim, slices
        self.holds: dict[str, str] = {}


def _like(operand: str) -> str:
    """What an operand without a name of its own is called: `_q`; a plain x goes by the op that makes it."""
    return "" if operand == "x" else f"_{operand}"


def _assigned(item: syntax.Repeat) -> Iterator[syntax.Name]:
    for statement in item.body:
        if isinstance(statement, syntax.Bind):
            yield from statement.names
        else:
            yield from _assigned(statement)


def _dims(type: Type) -> str:
    return f"[{', '.join(type.dims)}]"
