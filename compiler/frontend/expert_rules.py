"""Rules of a route's body: from each row of tokens it computes a row, by parameters that each
expert has of its own.
"""

from collections.abc import Sequence, Set

from ..ir import BATCH, DATA_DIMS, Op, Param, Type
from ..ops.concat import CONCAT, SPLIT
from ..ops.pointwise import FUNCTIONS
from ..syntax import tree
from ..syntax.diagnostics import Note, listing, wrong
from ..syntax.source import Span

ROW_BY_ROW = tuple(sorted(op.name for op in (*FUNCTIONS, CONCAT, SPLIT)))
"""The ops that experts have, besides `@`, arithmetic, and user ops along `..`."""


def check_op(name: tree.Name) -> None:
    """Raises PlanError unless experts have the op."""
    if name.name not in ROW_BY_ROW:
        help = (
            "use it before the route or after it; experts have `@`, arithmetic, user ops,"
            f" {listing(ROW_BY_ROW)}"
        )
        raise wrong("E0220", f"experts have no `{name}`", name.span, "in a route", help)


def check_rows(type: Type, span: Span) -> None:
    """Raises PlanError where an operand has no tokens."""
    if BATCH not in type.dims:
        help = (
            "a parameter of experts is the right side of a product or a sum, `y @ w[hidden ->"
            " ffn] + b[ffn]`"
        )
        label = f"has [{', '.join(type.dims)}]"
        raise wrong("E0220", "experts compute with tokens, and this has none", span, label, help)


def check_user_op(op: Op, experts: str) -> None:
    """Raises PlanError where a function is to see more of the tokens than a row."""
    dims: set[str] = set()
    for words in op.names("takes"):
        dims.update(words.split())
    if dims & {experts, *DATA_DIMS}:
        help = (
            "a signature such as `op f(x[.., d]) -> [.., d] over ..` leaves the dims of tokens"
            " to `..`"
        )
        raise wrong(
            "E0220", "experts see each token by itself", op.span, "takes dims of tokens", help
        )


def check_declared(use: tree.ParamUse, experts: str, routed: Set[str]) -> None:
    """Raises PlanError where a parameter names one of the dims `routed`, or the dim `experts` of
    the route around it.
    """
    for dim in (*use.outs, *use.ins):
        if dim.name == experts:
            help = "leave it out: each parameter in the route has it by itself, in front"
            raise wrong(
                "E0220", f"`{use.name}` has `{dim}` twice", dim.span, f"in a route to `{dim}`", help
            )
        if dim.name in routed:
            help = (
                f"logits are written in the route, `by top(y @ router[hidden -> {dim}], 2)`;"
                " all else has other dims"
            )
            message = f"`{dim}` is the dim of a route's logits and of the parameters in it"
            raise wrong("E0220", message, dim.span, "outside of both", help)


def check_used(
    param: Param, param_experts: Sequence[str], route_experts: Sequence[str], span: Span
) -> None:
    """Raises PlanError where a parameter of some experts is used in a route to others.

    `param_experts` and `route_experts` have one dim of experts, or none outside of routes.
    """
    if (*param_experts,) == (*route_experts,):
        return
    help = ""
    if not param_experts:
        help = (
            "declare another one in the route, of which each of the"
            f" `{route_experts[0]}` has its own"
        )
    notes = (Note(param.span, "declared here"),)
    message = f"`{param.name}` is declared {_where(param_experts)}"
    raise wrong("E0220", message, span, f"used {_where(route_experts)}", help, notes=notes)


def _where(experts: Sequence[str]) -> str:
    return f"in a route to `{experts[0]}`" if experts else "outside of routes"
