"""The attributes of an op: their values, and the ranges that these are in."""

from collections.abc import Sequence

from ..ir import BATCH, Attr, Op
from ..ops import Attribute, OpDef
from ..syntax import tree
from ..syntax.diagnostics import Diagnostics, did_you_mean, listing, wrong
from .arithmetic import Scalar, evaluate
from .draft import Draft
from .errors import check_dim
from .other_names import help_for_choice
from .scope import Scope


def get_attribute(draft: Draft, attribute: Attribute, expr: tree.Expr, first: str) -> Attr:
    """The value that `expr` gives an attribute; `first` is the first operand, whose dims it may
    name.

    Raises PlanError.
    """
    scope = draft.scope
    if attribute.dims == "any":
        return _get_dim(expr, scope.dims, scope)
    if attribute.dims == "several":
        if len(_items(expr)) < 2:
            raise wrong(
                "E0307", "several dims are needed here", expr.span, "as in `[heads_dim, rest]`"
            )
        return tuple(_get_dim(item, scope.dims, scope) for item in _items(expr))
    if attribute.dims:
        dims = draft.builder.types[first].dims
        return tuple(_get_dim(item, dims, scope) for item in _items(expr))
    if attribute.choices:
        return _get_choice(expr, attribute.choices)
    return _get_number(attribute, expr, evaluate(expr, scope.numbers))


def _get_number(attribute: Attribute, expr: tree.Expr, number: Scalar) -> float:
    value = float(number)
    if attribute.share and not 0 <= value < 1:
        label = f"`{attribute.name}` is {value:g}"
        raise wrong("E0610", "a fraction is at least 0 and less than 1", expr.span, label)
    if attribute.kinds != (int,):
        return value
    if value % 1:
        raise wrong("E0313", f"`{attribute.name}` is a whole number", expr.span, f"is {value:g}")
    return int(value)


def _get_dim(expr: tree.Expr, dims: Sequence[str], scope: Scope) -> str:
    """A dim as an argument: one of `dims`, but not the one that counts samples."""
    if not isinstance(expr, tree.Name):
        help = f"dims go by name; here they are {listing(dims)}"
        raise wrong("E0307", "a dim is needed here", expr.span, "is not a dim", help)
    check_dim(expr, scope.dims)
    if expr.name not in dims:
        label, help = f"its dims are [{', '.join(dims)}]", did_you_mean(expr.name, dims)
        raise wrong("E0307", f"`{expr}` is not a dim of this operand", expr.span, label, help)
    if expr.name == BATCH:
        label = "samples are independent of each other"
        raise wrong("E0307", "no op works along `batch`", expr.span, label)
    return expr.name


def _get_choice(expr: tree.Expr, choices: Sequence[str]) -> str:
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
