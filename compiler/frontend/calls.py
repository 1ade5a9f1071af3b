"""Writes the op that a call means, when the values of its operands are known."""

from collections.abc import Mapping, Sequence

from attrs import frozen

from ..ir import FLOATS, Attr, Op
from ..ops import OPS, Attribute, OpDef, Operand, TypingError
from ..ops.dropout import DROPOUT, SITE
from ..syntax import tree
from ..syntax.diagnostics import PlanError, Unknown, wrong
from .arguments import signature
from .attributes import check_ranges, get_attribute
from .builder import UNKNOWN, Attrs
from .draft import Draft
from .errors import check_count
from .expert_rules import check_user_op
from .other_names import help_for_op, is_foreign_op
from .user_ops import UserOp


@frozen
class CallOperand:
    """An operand of a call: its row in the op's table, its expression and the value of this."""

    entry: Operand
    expr: tree.Expr
    value: str


def write_op_call(
    draft: Draft,
    call: tree.Call,
    entry: OpDef,
    operands: tuple[str, ...],
    attrs: Attrs,
    like: Sequence[str],
) -> tuple[str, ...]:
    """Writes a call of the language's op `entry`; its results, as many as `like`, and named after
    these.
    """
    draft.require_rows(operands, call.span)
    values = dict(attrs)
    if entry is DROPOUT and not values["p"]:
        check_count(1, like, call.span)
        return operands
    # an op with a fraction that is not zero draws what it drops
    if any(values.get(attribute.name) for attribute in entry.attributes if attribute.share):
        draws, site = draft.draws.next(call.span)
        operands, attrs = (*operands, draws), (*attrs, (SITE.name, site))
    return draft.builder.several(entry.name, operands, attrs, call.span, like)


def write_user_op_call(
    draft: Draft,
    call: tree.Call,
    user_op: UserOp,
    operands: tuple[str, ...],
    numbers: Attrs,
    like: Sequence[str],
) -> tuple[str, ...]:
    """Writes a call of one of the plan's own ops; its results, as many as `like`."""
    types = [draft.builder.types[name] for name in operands]
    try:
        attrs = user_op.attributes(types, [float(str(value)) for _, value in numbers])
    except TypingError as error:
        raise wrong("E0307", str(error), call.span, "these dims do not fit") from None
    draft.require_rows(operands, call.span)
    experts = draft.scope.route.experts
    if experts:
        check_user_op(Op("call", operands, (), attrs, span=call.span), experts)
    names = [name or f"_{user_op.entry.name}" for name in like]
    return draft.builder.several("call", operands, attrs, call.span, names)


def get_attrs(
    draft: Draft,
    call: tree.Call,
    entry: OpDef,
    operands: Sequence[CallOperand],
    attributes: Sequence[tuple[Attribute, tree.Expr]],
) -> Attrs:
    """The attributes of a call of `entry`, without the ones that have their default.

    Raises Unknown where one of the `operands` or `attributes` has a mistake.
    """
    before, attrs = draft.diagnostics.count, dict[str, Attr]()
    with draft.diagnostics.catch():
        for operand in operands:
            if operand.value != UNKNOWN:
                _check_kind(draft, entry, operand)
    first = operands[0].value
    for attribute, expr in attributes:
        with draft.diagnostics.catch():
            attrs[attribute.name] = get_attribute(draft, attribute, expr, first)
    has_unknown = any(operand.value == UNKNOWN for operand in operands)
    if has_unknown or draft.diagnostics.count > before:
        op = Op(entry.name, (), (), tuple(attrs.items()), span=call.span)
        check_ranges(entry, op, draft.diagnostics)
        raise Unknown
    for attribute in entry.attributes:
        if attribute.dims == "last" and attribute.name not in attrs:
            attrs[attribute.name] = draft.builder.types[first].dims[-1:]
    defaults = {attribute.name: attribute.default for attribute in entry.attributes}
    return tuple((name, value) for name, value in attrs.items() if value != defaults[name])


def _check_kind(draft: Draft, entry: OpDef, operand: CallOperand) -> None:
    """Token ids go where they are looked up, labels into the loss, and numbers everywhere else."""
    expected, input_name = operand.entry.input_name, ""
    if draft.builder.types[operand.value].dtype not in FLOATS:
        input_name = operand.value
    if input_name != expected:
        wanted = f"the input `{expected}`" if expected else "numbers"
        message = f"`{entry.name}` takes {wanted} here"
        help = f"it is written `{signature(entry)}`"
        raise wrong("E0607", message, operand.expr.span, f"`{operand.entry.name}`", help)


def unknown_op(call: tree.Call, dims: Sequence[str], user_ops: Mapping[str, UserOp]) -> PlanError:
    """The mistake of a call of an op that is neither the language's nor the plan's."""
    help = _help_for_unknown(call, dims, user_ops)
    return wrong("E0605", f"there is no op `{call.name}`", call.name.span, "not an op", help)


def _help_for_unknown(call: tree.Call, dims: Sequence[str], user_ops: Mapping[str, UserOp]) -> str:
    names = [argument.name for argument in call.args if isinstance(argument, tree.Name)]
    is_parameter = names and len(names) == len(call.args) and {*names} <= {*dims}
    if is_parameter and not is_foreign_op(call.name.name):
        return (
            f"a parameter has brackets: `{call.name}[{', '.join(names)}]`, and `->` after"
            " dims that are summed"
        )
    names = [name for name, op in OPS.items() if op.user_visible]
    return help_for_op(call.name.name, [*names, *user_ops])
