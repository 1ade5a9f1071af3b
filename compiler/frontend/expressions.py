"""Expressions as ops: names, parameters, and the arithmetic of tensors and numbers."""

import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

from attrs import frozen

from ..ir import BATCH, DATA_DIMS, FLOATS, Type
from ..ops.experts import BIASED, GROUPED
from ..ops.protocol import wide
from ..syntax import tree
from ..syntax.diagnostics import Note, PlanError, did_you_mean, listing, wrong
from .arithmetic import Scalar, apply, evaluate, exact
from .builder import UNKNOWN
from .calls import Calls
from .errors import check_count
from .inputs import INPUTS
from .other_names import help_for_value

MOST_OPERANDS = 256
"""The most operands of one expression."""

ELEMENTWISE = {"+": "add", "-": "add", "*": "mul", "/": "div"}
"""The op of two tensors that each operator means; a difference is a sum with the negated second
tensor.
"""


@frozen
class Expressions(Calls):
    """Writes the ops of expressions; the base of `Routes`."""

    def tensor(self, expr: tree.Expr, like: str = "") -> str:
        """The value that `expr` computes, named after `like` if it is a new one; UNKNOWN where
        it has a mistake.
        """
        with self._diagnostics.catch():
            return self._tensor(expr, like)
        return UNKNOWN

    def _tensor(self, expr: tree.Expr, like: str) -> str:
        match expr:
            case tree.Name():
                return self._to_wide(self._value_of_name(expr), expr)
            case tree.ParamUse():
                return self._to_wide(self._parameters.declare(expr), expr)
            case tree.Call():
                return self.call(expr, [like])[0]
            case tree.Binary():
                return self._chain(expr, like)
            case tree.Negative(inner) if not self._scope.is_number(inner):
                return self._scale_or_shift("scale", self.tensor(inner), -1, expr, like)
            case _:
                raise wrong("E0603", "a tensor is needed here", expr.span, "is not a tensor")

    def tensors(self, expr: tree.Expr, like: Sequence[str]) -> tuple[str, ...]:
        """The values that a call computes, one for each name; UNKNOWN where it has a mistake."""
        with self._diagnostics.catch():
            if isinstance(expr, tree.Call):
                return self.call(expr, like)
            value = self.tensor(expr, like[0])
            check_count(1, like, expr.span)
            return (value,)
        return (UNKNOWN,) * len(like)

    @contextmanager
    def in_logits(self, twins: Mapping[str, str]) -> Generator[None]:
        """Within it, parameters have twins of dims, and all is computed in float32 at least."""
        self._parameters.twins = twins
        yield
        self._parameters.twins = {}

    def _to_wide(self, value: str, expr: tree.Expr) -> str:
        dtype = self._builder.types[value].dtype
        if not self._parameters.twins or dtype not in FLOATS or wide(dtype) == dtype:
            return value
        return self._builder.op("cast", (value,), (("dtype", wide(dtype)),), expr.span, "")

    def _value_of_name(self, name: tree.Name) -> str:
        bound, params = self._scope.bound, self._parameters.all
        if name.name in bound:
            return bound[name.name]
        if name.name in params:
            return self._parameters.use(params[name.name], name.span)
        if name.name in self._scope.elsewhere:
            help = "make it inside the route"
            raise wrong(
                "E0220",
                f"experts see what they are sent, and `{name}` is of all tokens",
                name.span,
                help=help,
            )
        if name.name in self._scope.numbers:
            raise wrong("E0603", "a tensor is needed here", name.span, f"`{name}` is a number")
        help = help_for_value(name.name) or did_you_mean(name.name, [*bound, *params])
        if name.name in INPUTS:
            help = f"add `{name}[batch, seq]` to the model's inputs"
        elif not help:
            help = (
                "a parameter is declared by its dims where it is first used, as in"
                f" `{name}[hidden]` or `{name}[hidden -> ffn]`"
            )
        raise wrong("E0201", f"`{name}` is not defined", name.span, "not known here", help)

    def _chain(self, expr: tree.Binary, like: str) -> str:
        links = expr.links
        if len(links) >= MOST_OPERANDS:
            message = f"an expression of more than {MOST_OPERANDS} operands"
            raise wrong("E0102", message, expr.span, help="name parts of it")
        value = self._either(links[0].left)
        for link in links:
            right, left, value = self._either(link.right), value, UNKNOWN
            with self._diagnostics.catch():
                value = self._binary(link, left, right, like if link is expr else "")
        if not isinstance(value, str):
            raise wrong("E0603", "a tensor is needed here", expr.span, "is a number")
        return value

    def _either(self, expr: tree.Expr) -> str | Scalar:
        """The value that `expr` computes, or the number that it is; UNKNOWN where it has a
        mistake.
        """
        if not self._scope.is_number(expr):
            return self.tensor(expr)
        with self._diagnostics.catch():
            return evaluate(expr, self._scope.numbers)
        return UNKNOWN

    def _binary(
        self, link: tree.Binary, left: str | Scalar, right: str | Scalar, like: str
    ) -> str | Scalar:
        if isinstance(left, str):
            self.require_rows((left,), link.left.span)
            if isinstance(right, str):
                return self._of_tensors(link, left, right, like)
            return self._with_number(link, left, right, True, like)
        if isinstance(right, str):
            if link.op != "@":
                self.require_rows((right,), link.right.span)
            return self._with_number(link, right, left, False, like)
        return apply(link, left, right)

    def _of_tensors(self, link: tree.Binary, left: str, right: str, like: str) -> str:
        """A sum, difference, product or quotient of two tensors; in a route, of rows of experts."""
        experts, order = self._parameters.experts, self._parameters.order
        if link.op == "@":
            over = (("over", self._contraction_dims(link, left, right)),)
            if experts:
                return self._builder.op(GROUPED.name, (left, right, *order), over, link.span, like)
            return self._builder.op("contract", (left, right), over, link.span, like)
        if experts and link.op == "+":
            types = self._builder.types
            row_dims = tuple(dim for dim in types[left].dims if dim not in DATA_DIMS)
            if types[right].dims == row_dims:  # a parameter of experts, a row of each
                return self._builder.op(BIASED.name, (left, right, *order), (), link.span, like)
        self.require_rows((right,), link.right.span)
        if link.op == "-":
            right = self._scale_or_shift("scale", right, -1, link)
        return self._builder.op(ELEMENTWISE[link.op], (left, right), (), link.span, like)

    def _with_number(
        self, link: tree.Binary, tensor: str, number: Scalar, is_last: bool, like: str
    ) -> str:
        """A sum, difference, product or quotient of a tensor and a number, which is first or
        last.
        """
        match link.op:
            case "+":
                return self._scale_or_shift("shift", tensor, number, link, like)
            case "-" if is_last:
                return self._scale_or_shift("shift", tensor, -number, link, like)
            case "-":
                return self._scale_or_shift(
                    "shift", self._scale_or_shift("scale", tensor, -1, link), number, link, like
                )
            case "*":
                return self._scale_or_shift("scale", tensor, number, link, like)
            case "/" if is_last and number:
                return self._scale_or_shift("scale", tensor, 1 / exact(number), link, like)
            case "/" if not is_last:
                help = (
                    "a tensor may be divided by a tensor or a number; `sigmoid(x)` is 1 / (1 +"
                    " exp(-x))"
                )
                raise wrong(
                    "E0604",
                    "a number cannot be divided by a tensor",
                    link.span,
                    "a number / a tensor",
                    help,
                )
            case _:
                help = (
                    "a tensor may be multiplied by a number, divided by one that is not 0, and"
                    " added to one"
                )
                raise wrong(
                    "E0604",
                    f"`{link.op}` cannot combine these",
                    link.span,
                    "a tensor and a number",
                    help,
                )

    def _scale_or_shift(
        self, kind: str, value: str, by: Scalar, expr: tree.Expr, like: str = ""
    ) -> str:
        """A tensor scaled or shifted by a number."""
        self.require_rows((value,), expr.span)
        if abs(by) > sys.float_info.max:
            raise wrong(
                "E0302", "a number that is too large", expr.span, "beyond 64-bit floating point"
            )
        return self._builder.op(kind, (value,), (("by", float(by)),), expr.span, like)

    def _contraction_dims(self, link: tree.Binary, left: str, right: str) -> tuple[str, ...]:
        """The dims that `@` sums over: the ones before the arrow, or all that both operands have
        but experts.
        """
        x, w = self._builder.types[left], self._builder.types[right]
        if BATCH in x.dims and BATCH in w.dims:
            raise _activations(link, x, w)
        over: tuple[str, ...] = ()
        if isinstance(link.right, tree.ParamUse):
            over = tuple(map(str, link.right.ins))
        if not over:
            shared = [dim for dim in x.dims if dim in w.dims]
            over = tuple(dim for dim in shared if dim != self._parameters.experts)
        if over and x.dims[-len(over) :] == over == w.dims[-len(over) :]:
            self._parameters.make_matrix(link.right, len(over))
            return over
        raise wrong(
            "E0306",
            "these operands cannot be multiplied",
            link.span,
            _dims(x, w),
            _arrow(link.right, x),
        )


def _dims(x: Type, w: Type) -> str:
    return f"[{', '.join(x.dims)}] @ [{', '.join(w.dims)}]"


def _arrow(right: tree.Expr, x: Type) -> str:
    """Help for a product: an arrow after the dims of a parameter that `x` ends in."""
    if isinstance(right, tree.ParamUse):
        dims = tuple(map(str, (*right.outs, *right.ins)))
        over = tuple(dim for dim in x.dims if dim in dims)
        other_dims = tuple(dim for dim in dims if dim not in over)
        if over and other_dims and x.dims[-len(over) :] == over:
            written = f"{right.name}[{', '.join(over)} -> {', '.join(other_dims)}]"
            return f"write `{written}`: `@` sums over the dims before the arrow"
    return "`@` sums over the last dims of its left side, which the right side must have"


def _activations(link: tree.Binary, x: Type, w: Type) -> PlanError:
    """The mistake that both sides of a product have samples: a sum over samples would depend on
    which of them share a microbatch.
    """
    shared = [dim for dim in x.dims if dim in w.dims]
    note = f"`@` sums over all dims that both sides have, and so over samples: {listing(shared)}"
    help = "queries and keys are multiplied in `attention(q, k, v, mask=causal)`"
    if x.dims == w.dims:
        help += f"; a sum of products for each token is `sum(x * y, over={shared[-1]})`"
    return wrong(
        "E0613",
        "a product of two activations",
        link.span,
        _dims(x, w),
        help,
        notes=(Note(None, note),),
    )
