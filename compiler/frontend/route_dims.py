"""The dims that routes need and no plan names: of choices, and of logits."""

from collections.abc import Mapping

from attrs import evolve

from ..ir import Dim, Program
from ..ops.routers import TOP
from ..syntax import tree
from ..syntax.diagnostics import Diagnostics, PlanError, wrong
from .arithmetic import Scalar, evaluate
from .errors import check_dim, check_not_data
from .route_call import CHOICES, find_routes, get_argument


def route_dims(
    model: tree.Model,
    dims: Mapping[str, Dim],
    numbers: Mapping[str, Scalar],
    diagnostics: Diagnostics,
) -> dict[str, Dim]:
    """The dims that routes need besides `dims`.

    Dims of experts, which now have one of choices; the dims of choices; and twins: of experts for
    logits, and of repeats for loads of all layers.  Where the number of choices cannot be known it
    is 1.
    """
    new_dims: dict[str, Dim] = {}
    for route, repeats in find_routes(model.body):
        for name in repeats:
            twinned = {dim.twin for dim in new_dims.values()}
            if name in dims and name not in twinned:
                all_ = _free_name(f"all_{name}", name, {*dims, *new_dims})
                new_dims[all_] = Dim(all_, dims[name].size, twin=name, span=dims[name].span)
        with diagnostics.catch():
            check_dim(route.dim, dims)
            check_not_data(route.dim, "a route")
            _route_dims(route, dims, numbers, new_dims, diagnostics)
    return new_dims


def _route_dims(
    route: tree.Route,
    dims: Mapping[str, Dim],
    numbers: Mapping[str, Scalar],
    new_dims: dict[str, Dim],
    diagnostics: Diagnostics,
) -> None:
    experts, count = dims[route.dim.name], 1
    try:
        count = _count(route, experts.size, numbers)
    except PlanError as error:
        diagnostics.add(error)
        diagnostics.doubt(str(route.by))
    if experts.name in new_dims:
        if new_dims[new_dims[experts.name].chosen].size != count:
            help = (
                "give the experts of one of the routes a dim of their own, as large as"
                f" `{experts.name}`"
            )
            label = "another route to them chooses another number"
            message = f"two routes to `{experts.name}` choose different numbers"
            diagnostics.error("E0316", message, route.span, label, help=help)
        return
    chosen = _free_name("chosen", experts.name, {*dims, *new_dims})
    scored = _free_name("scored", experts.name, {*dims, *new_dims})
    new_dims[chosen] = Dim(chosen, count, span=experts.span)
    new_dims[scored] = Dim(scored, experts.size, twin=experts.name, span=experts.span)
    new_dims[experts.name] = evolve(experts, chosen=chosen)


def _count(route: tree.Route, experts: int, numbers: Mapping[str, Scalar]) -> int:
    """The number of each token's choices."""
    if route.by.name.name != TOP.name:
        help = f"write `by {TOP.name}(y @ router[hidden -> {route.dim}], 2)`"
        raise wrong(
            "E0605",
            f"`{route.by.name}` does not choose experts",
            route.by.name.span,
            "unknown here",
            help,
        )
    expr = get_argument(route, CHOICES.name)
    if expr is None:
        help = f"write `{TOP.name}(…, 2)`"
        raise wrong(
            "E0606",
            "`top` needs an argument `k`",
            route.by.span,
            "how many experts each token has",
            help,
        )
    count = evaluate(expr, numbers)
    if count != int(count) or not 1 <= count <= experts:
        label = f"`{route.dim}` is {experts}"
        raise wrong(
            "E0316", f"{float(count):g} of {experts} experts cannot be chosen", expr.span, label
        )
    return int(count)


def _free_name(name: str, experts: str, used_names: set[str]) -> str:
    if name in used_names:
        name = f"{name}_{experts}"
    while name in used_names:
        name += "_"
    return name


def get_logits_dim(program: Program, experts: str) -> str:
    """The dim of experts in logits, which is their twin."""
    return next(dim.name for dim in program.dims if dim.twin == experts)
