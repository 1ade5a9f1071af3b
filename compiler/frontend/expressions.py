"""Writes the ops of expressions: names, parameters, operators and calls.

Purpose: the recursion, since an operand of an operator or of a call is an expression again.
Non-goals: what a single operator means (`operators`) or a single call (`calls`).
"""

from collections.abc import Sequence

from ..ir import FLOATS
from ..ops import OPS, OpDef
from ..ops.protocol import wide
from ..syntax import tree
from ..syntax.diagnostics import did_you_mean, wrong
from .arguments import get_arguments
from .arithmetic import Scalar, evaluate
from .builder import UNKNOWN, Attrs
from .calls import CallOperand, get_attrs, unknown_op, write_op_call, write_user_op_call
from .draft import Draft
from .errors import check_count
from .expert_rules import check_op
from .inputs import INPUTS
from .operators import write_binary, write_with_constant
from .other_names import help_for_value

MOST_OPERANDS = 256
"""The most operands of one expression."""


def write_tensor(draft: Draft, expr: tree.Expr, like: str = "") -> str:
    """Writes `expr`; its value, named after `like` if it is a new one, UNKNOWN where it has a
    mistake.
    """
    with draft.diagnostics.catch():
        return _write(draft, expr, like)
    return UNKNOWN


def write_tensors(draft: Draft, expr: tree.Expr, like: Sequence[str]) -> tuple[str, ...]:
    """Writes `expr`; its values, one for each name, UNKNOWN where it has a mistake."""
    with draft.diagnostics.catch():
        if isinstance(expr, tree.Call):
            return _write_call(draft, expr, like)
        value = write_tensor(draft, expr, like[0])
        check_count(1, like, expr.span)
        return (value,)
    return (UNKNOWN,) * len(like)


def write_arguments(draft: Draft, call: tree.Call, entry: OpDef) -> tuple[tuple[str, ...], Attrs]:
    """Writes the operands of a call of `entry`; their values, and the attributes that have not
    their default.
    """
    operand_exprs, attribute_exprs = get_arguments(call, entry, draft.scope.is_number)
    for operand, expr in operand_exprs:
        draft.parameters.begin(expr, operand.init)
    operands: list[CallOperand] = []
    for operand, expr in operand_exprs:
        # a plain x goes by the op that makes it
        stem = "" if operand.name == "x" else f"_{operand.name}"
        operands.append(CallOperand(operand, expr, write_tensor(draft, expr, stem)))
    attrs = get_attrs(draft, call, entry, operands, attribute_exprs)
    return tuple(operand.value for operand in operands), attrs


def _write(draft: Draft, expr: tree.Expr, like: str) -> str:
    match expr:
        case tree.Name():
            return _to_wide(draft, _get_value(draft, expr), expr)
        case tree.ParamUse():
            return _to_wide(draft, draft.parameters.declare(expr), expr)
        case tree.Call():
            return _write_call(draft, expr, [like])[0]
        case tree.Binary():
            return _write_chain(draft, expr, like)
        case tree.Negative(inner) if not draft.scope.is_number(inner):
            value = write_tensor(draft, inner)
            return write_with_constant(draft, "scale", value, -1, expr.span, like)
        case _:
            raise wrong("E0603", "a tensor is needed here", expr.span, "is not a tensor")


def _to_wide(draft: Draft, value: str, expr: tree.Expr) -> str:
    """The value, in the logits of a route as float32 at least."""
    dtype = draft.builder.types[value].dtype
    if not draft.scope.twins or dtype not in FLOATS or wide(dtype) == dtype:
        return value
    return draft.builder.op("cast", (value,), (("dtype", wide(dtype)),), expr.span, "")


def _get_value(draft: Draft, name: tree.Name) -> str:
    """The value of a name.  Raises PlanError where it has none."""
    scope, params = draft.scope, draft.parameters.all
    if name.name in scope.bound:
        return scope.bound[name.name]
    if name.name in params:
        return draft.parameters.use(params[name.name], name.span)
    if name.name in scope.route.outside:
        message = f"experts see what they are sent, and `{name}` is of all tokens"
        raise wrong("E0220", message, name.span, help="make it inside the route")
    if name.name in scope.numbers:
        raise wrong("E0603", "a tensor is needed here", name.span, f"`{name}` is a number")
    help = help_for_value(name.name) or did_you_mean(name.name, [*scope.bound, *params])
    if name.name in INPUTS:
        help = f"add `{name}[batch, seq]` to the model's inputs"
    elif not help:
        help = (
            "a parameter is declared by its dims where it is first used, as in"
            f" `{name}[hidden]` or `{name}[hidden -> ffn]`"
        )
    raise wrong("E0201", f"`{name}` is not defined", name.span, "not known here", help)


def _write_chain(draft: Draft, expr: tree.Binary, like: str) -> str:
    """Writes operators that follow one another; the last result has the name `like`."""
    links = expr.links
    if len(links) >= MOST_OPERANDS:
        message = f"an expression of more than {MOST_OPERANDS} operands"
        raise wrong("E0102", message, expr.span, help="name parts of it")
    value = _write_operand(draft, links[0].left)
    for link in links:
        right, left, value = _write_operand(draft, link.right), value, UNKNOWN
        with draft.diagnostics.catch():
            value = write_binary(draft, link, left, right, like if link is expr else "")
    if not isinstance(value, str):
        raise wrong("E0603", "a tensor is needed here", expr.span, "is a number")
    return value


def _write_operand(draft: Draft, expr: tree.Expr) -> str | Scalar:
    """Writes an operand; its value, or the number that it is, UNKNOWN where it has a mistake."""
    if not draft.scope.is_number(expr):
        return write_tensor(draft, expr)
    with draft.diagnostics.catch():
        return evaluate(expr, draft.scope.numbers)
    return UNKNOWN


def _write_call(draft: Draft, call: tree.Call, like: Sequence[str]) -> tuple[str, ...]:
    """Writes a call; its results, as many as `like`, and named after these."""
    if user_op := draft.user_ops.get(call.name.name):
        operands, numbers = write_arguments(draft, call, user_op.entry)
        return write_user_op_call(draft, call, user_op, operands, numbers, like)
    entry = OPS.get(call.name.name)
    if entry is None or not entry.user_visible:
        _write_doubtful_call(draft, call)
        raise unknown_op(call, draft.scope.dims, draft.user_ops)
    if draft.scope.route.experts:
        check_op(call.name)
    operands, attrs = write_arguments(draft, call, entry)
    return write_op_call(draft, call, entry, operands, attrs, like)


def _write_doubtful_call(draft: Draft, call: tree.Call) -> None:
    """Writes the arguments of an op of the plan's own that has a mistake: they declare parameters
    and may have mistakes themselves.
    """
    if call.name.name in draft.diagnostics.doubtful:
        for argument in call.args:
            if not draft.scope.is_number(argument):
                write_tensor(draft, argument)
