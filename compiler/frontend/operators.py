"""Writes the op that an operator means, when the values of its operands are known."""

import sys

from ..ir import BATCH, DATA_DIMS, Type
from ..ops.experts import BIASED, GROUPED
from ..syntax import tree
from ..syntax.diagnostics import Note, PlanError, listing, wrong
from ..syntax.source import Span
from .arithmetic import Scalar, apply, exact
from .draft import Draft

ELEMENTWISE = {"+": "add", "-": "add", "*": "mul", "/": "div"}
"""The op of two tensors that each operator means; a difference is a sum with the negated second
tensor.
"""


def write_binary(
    draft: Draft, link: tree.Binary, left: str | Scalar, right: str | Scalar, like: str
) -> str | Scalar:
    """Writes an operator between tensors or numbers; its result, of two numbers a number."""
    if isinstance(left, str):
        draft.require_rows((left,), link.left.span)
        if isinstance(right, str):
            return _write_of_tensors(draft, link, left, right, like)
        return _write_with_number(draft, link, left, right, True, like)
    if isinstance(right, str):
        if link.op != "@":
            draft.require_rows((right,), link.right.span)
        return _write_with_number(draft, link, right, left, False, like)
    return apply(link, left, right)


def write_with_constant(
    draft: Draft, kind: str, value: str, by: Scalar, span: Span, like: str = ""
) -> str:
    """Writes `scale` or `shift` of a tensor by a number; its result."""
    draft.require_rows((value,), span)
    if abs(by) > sys.float_info.max:
        label = "beyond 64-bit floating point"
        raise wrong("E0302", "a number that is too large", span, label)
    return draft.builder.op(kind, (value,), (("by", float(by)),), span, like)


def _write_of_tensors(draft: Draft, link: tree.Binary, left: str, right: str, like: str) -> str:
    """Writes a sum, difference, product or quotient of two tensors; in a route, of rows of
    experts.
    """
    builder, route, span = draft.builder, draft.scope.route, link.span
    if link.op == "@":
        over = (("over", _contraction_dims(draft, link, left, right)),)
        if route.experts:
            return builder.op(GROUPED.name, (left, right, *route.order), over, span, like)
        return builder.op("contract", (left, right), over, span, like)
    if route.experts and link.op == "+":
        row_dims = tuple(dim for dim in builder.types[left].dims if dim not in DATA_DIMS)
        if builder.types[right].dims == row_dims:  # a parameter of experts, a row of each
            return builder.op(BIASED.name, (left, right, *route.order), (), span, like)
    draft.require_rows((right,), link.right.span)
    if link.op == "-":
        right = write_with_constant(draft, "scale", right, -1, span)
    return builder.op(ELEMENTWISE[link.op], (left, right), (), span, like)


def _write_with_number(
    draft: Draft, link: tree.Binary, tensor: str, number: Scalar, is_last: bool, like: str
) -> str:
    """Writes a sum, difference, product or quotient of a tensor and a number, which is first or
    last.
    """
    span = link.span
    match link.op:
        case "+":
            return write_with_constant(draft, "shift", tensor, number, span, like)
        case "-" if is_last:
            return write_with_constant(draft, "shift", tensor, -number, span, like)
        case "-":
            negated = write_with_constant(draft, "scale", tensor, -1, span)
            return write_with_constant(draft, "shift", negated, number, span, like)
        case "*":
            return write_with_constant(draft, "scale", tensor, number, span, like)
        case "/" if is_last and number:
            return write_with_constant(draft, "scale", tensor, 1 / exact(number), span, like)
        case "/" if not is_last:
            message, label = "a number cannot be divided by a tensor", "a number / a tensor"
            help = (
                "a tensor may be divided by a tensor or a number; `sigmoid(x)` is 1 / (1 + exp(-x))"
            )
            raise wrong("E0604", message, span, label, help)
        case _:
            message, label = f"`{link.op}` cannot combine these", "a tensor and a number"
            help = (
                "a tensor may be multiplied by a number, divided by one that is not 0, and"
                " added to one"
            )
            raise wrong("E0604", message, span, label, help)


def _contraction_dims(draft: Draft, link: tree.Binary, left: str, right: str) -> tuple[str, ...]:
    """The dims that `@` sums over: the ones before the arrow, or all that both operands have but
    experts.
    """
    x, w = draft.builder.types[left], draft.builder.types[right]
    if BATCH in x.dims and BATCH in w.dims:
        raise _activations(link, x, w)
    over: tuple[str, ...] = ()
    if isinstance(link.right, tree.ParamUse):
        over = tuple(map(str, link.right.ins))
    if not over:
        shared = [dim for dim in x.dims if dim in w.dims]
        over = tuple(dim for dim in shared if dim != draft.scope.route.experts)
    if over and x.dims[-len(over) :] == over == w.dims[-len(over) :]:
        draft.parameters.make_matrix(link.right, len(over))
        return over
    message = "these operands cannot be multiplied"
    raise wrong("E0306", message, link.span, _dims(x, w), _arrow(link.right, x))


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
