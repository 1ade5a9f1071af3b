"""Routes: `route y to experts by top(logits, k, …) { … }`, a body that each expert applies to the
tokens it is sent.

Purpose: the ops before and after the body, and the count of the tokens of each expert.  Non-goals:
the statements of the body (`statements`), which are ordinary ones on rows.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager

from attrs import evolve, field, frozen

from ..config.settings import DROPLESS, PADDED
from ..ir import BATCH, DATA_DIMS, FLOATS, Attr, Program, Type
from ..ops.experts import COMBINE, DISPATCH, SORT
from ..ops.routers import ADD_LOAD, CAPACITY, NO_LOAD, TOP
from ..syntax import tree
from ..syntax.diagnostics import Note, PlanError, Unknown, wrong
from .draft import Draft
from .expressions import write_arguments
from .route_call import CALL, CHOICES, FACTORS, RATE, adds_to_loss, check_range, find_routes
from .route_dims import get_logits_dim
from .route_losses import ROUTER_LOSS, RouterLosses
from .scope import NO_ROUTE, OpenRoute

LOAD = "_load"
"""The beginning of the names in a model's scope of its routes' loads."""


@frozen
class Routes:
    """Writes the ops around the bodies of routes."""

    _draft: Draft
    _losses: RouterLosses
    # the names in the scope of routes' loads, by identity
    _loads: dict[int, str] = field(factory=dict[int, str], init=False)

    def begin(self, item: tree.Statement) -> None:
        """Begins the loads and the sums of losses that a statement's routes add to."""
        for route, repeats in find_routes((item,)):
            with self._draft.diagnostics.catch():
                tokens = self._tokens()
                self._begin_load(route, repeats, tokens)
                self._losses.begin_aux(route, tokens)
        self._losses.begin(item)

    def _tokens(self) -> str:
        """The first value in the scope that has one number for each token."""
        values, types = self._draft.scope.bound.values(), self._draft.builder.types
        return next(name for name in values if types[name].dims == DATA_DIMS)

    def _begin_load(self, route: tree.Route, repeats: Sequence[str], tokens: str) -> None:
        builder = self._draft.builder
        twins = {dim.twin: dim.name for dim in builder.program.dims if dim.twin}
        load_dims = (*repeats, route.dim.name)
        if not twins.keys() >= {*load_dims}:
            raise Unknown
        name = f"{LOAD}.{len(self._loads)}"
        self._loads[id(route)] = name
        attrs = (("dims", tuple(twins[dim] for dim in load_dims)),)
        self._draft.scope.bound[name] = builder.op(
            NO_LOAD.name, (tokens,), attrs, route.by.span, NO_LOAD.stem
        )

    def names_assigned(self, route: tree.Route) -> Iterator[str]:
        """The names that a route binds anew: its value, its load, and sums of losses."""
        yield route.value.name
        if adds_to_loss(route):
            yield ROUTER_LOSS
        if id(route) in self._loads:
            yield self._loads[id(route)]
        yield from self._losses.aux_sums(route)

    def results(self) -> tuple[str, ...]:
        """Results of a model beside its loss: the sum of its routers' losses, and loads."""
        self._losses.end()
        bound = self._draft.scope.bound
        names = [name for name in (ROUTER_LOSS, *self._loads.values()) if name in bound]
        return tuple(bound[name] for name in names)

    @contextmanager
    def route(self, item: tree.Route) -> Generator[None]:
        """Within it statements are the body's: they see the rows that it is sent, and no value of
        all tokens.
        """
        if id(item) not in self._loads:
            raise Unknown
        builder, scope = self._draft.builder, self._draft.scope
        name, experts = item.value.name, item.dim.name
        value = self._value(item)
        gates, order = self._order(item, builder.types[value])
        rows = builder.op(DISPATCH.name, (value, order), (), item.span, f"_{name}")
        outside = scope.bound
        is_padded = builder.program.train.experts == PADDED
        scope.route = OpenRoute(experts, () if is_padded else (order,), outside)
        scope.bound = {name: rows}
        yield
        end = scope.bound[name]
        scope.bound, scope.route = outside, NO_ROUTE
        dims_before, dims_after = builder.types[rows].dims, builder.types[end].dims
        if dims_after != dims_before:
            label = (
                f"enters as {_without_first(dims_before)}, leaves as {_without_first(dims_after)}"
            )
            raise wrong("E0305", f"`{name}` changes its dims in a route", item.value.span, label)
        scope.bound[name] = builder.op(COMBINE.name, (end, gates, order), (), item.span, name)

    def _value(self, item: tree.Route) -> str:
        """The value that a route sends to experts.  Raises PlanError where there is none."""
        name, scope = item.value, self._draft.scope
        if name.name not in scope.bound:
            help = (
                f"write `{name} = …` before: the route sends it to experts, and `{name}` is"
                " their sum after it"
            )
            raise wrong(
                "E0220",
                f"`{name}` is not bound before it is routed",
                name.span,
                "not known here",
                help,
            )
        type = self._draft.builder.types[scope.bound[name.name]]
        if BATCH not in type.dims or type.dtype not in FLOATS:
            raise wrong(
                "E0220",
                f"`{name}` has no tokens to route",
                name.span,
                f"its dims are [{', '.join(type.dims)}]",
            )
        scope.check_free(name)
        return scope.bound[name.name]

    def _order(self, item: tree.Route, value: Type) -> tuple[str, str]:
        """The gates, and the order of rows."""
        builder, scope, span = self._draft.builder, self._draft.scope, item.by.span
        experts = item.dim.name
        logits, biases, attrs = self._choice_arguments(item, value)
        factors: dict[str, float] = {}
        for attribute in FACTORS:
            number = float(str(attrs.pop(attribute.name, 0)))
            factors[attribute.name] = check_range(item, attribute, number)
        aux_loss = self._losses.take_aux(item, attrs)
        attrs.pop(CHOICES.name, None)  # it is the size of a dim
        _check_groups(builder.program, item, attrs)
        choice = (*attrs.items(), ("to", builder.program.dim(experts).chosen))
        gates, ids = builder.several(TOP.name, (logits, *biases), choice, span, ("gates", "ids"))
        self._losses.add(item, logits, ids, attrs, factors)
        self._losses.add_aux(experts, logits, ids, attrs, aux_loss)
        ids = self._limit_choices(item, ids, factors["capacity"])
        load = self._loads[id(item)]
        counted = (scope.bound[load], ids)
        scope.bound[load] = builder.op(ADD_LOAD.name, counted, (), span, ADD_LOAD.stem)
        order = builder.op(SORT.name, (ids,), (("to", experts),), span, SORT.stem)
        return gates, order

    def _choice_arguments(
        self, item: tree.Route, value: Type
    ) -> tuple[str, tuple[str, ...], dict[str, Attr]]:
        """A route's logits, its biases, and its other arguments by name.

        Logits are made in float32, whatever the model computes in.  `value` is the type of the
        route's value.
        """
        builder, experts = self._draft.builder, item.dim.name
        scored = get_logits_dim(builder.program, experts)
        call, bias = _without_biases(item.by)
        if str(item.by) in self._draft.diagnostics.doubtful:  # the number of choices is not known
            raise Unknown
        with self._draft.scope.in_logits({experts: scored}):
            operands, arguments = write_arguments(self._draft, call, CALL)
            attrs = dict(arguments)
            biases = self._biases(item, bias, attrs.get(RATE.name))
        dims = builder.types[operands[0]].dims
        tokens = value.dims[:-1]
        if dims != (*tokens, scored):
            actual = f"[{', '.join(dims)}]".replace(scored, experts)
            label = f"has {actual}, not [{', '.join((*tokens, experts))}]"
            message = (
                f"`{TOP.name}` takes logits of the tokens of `{item.value}`, one for each expert"
            )
            raise wrong("E0307", message, item.by.span, label)
        attrs.pop(RATE.name, None)
        return operands[0], (*operands[1:], *biases), attrs

    def _limit_choices(self, item: tree.Route, ids: str, capacity: float) -> str:
        """The choices that the capacity leaves, all of them if there is none.

        Raises PlanError where padded experts have no capacity.
        """
        train = self._draft.builder.program.train
        if capacity:
            attrs = (("capacity", capacity), ("experts", item.dim.name))
            return self._draft.builder.op(CAPACITY.name, (ids,), attrs, item.by.span, "ids")
        if train.experts != PADDED:
            return ids
        help = (
            f"write `{TOP.name}(…, capacity=1.25)`, or leave `experts` out: `{DROPLESS}`"
            " experts take all rows"
        )
        notes = (Note(train.spans["experts"], "rows of experts are padded to their capacity"),)
        message = "padded experts need a `capacity`"
        label = "any number of tokens to an expert"
        raise wrong("E0417", message, item.by.span, label, help, notes=notes)

    def _biases(self, item: tree.Route, bias: tree.Expr | None, rate: object) -> tuple[str, ...]:
        """The biases of a route's experts, which choose and are moved by the load."""
        if bias is None and rate is None:
            return ()
        one, other = ("rate", "bias") if bias is None else ("bias", "rate")
        example = f"`bias=router_bias[{item.dim}], rate=0.001`"
        if bias is None or rate is None:
            message = f"`{TOP.name}` has `{one}` and no `{other}`"
            raise wrong(
                "E0606", message, item.by.span, "the one moves the other", f"write {example}"
            )
        if not isinstance(bias, tree.ParamUse):
            message = "biases are declared where they are used, and are of one route"
            raise wrong("E0220", message, bias.span, "not biases", f"write {example}")
        if [*map(str, bias.outs), *map(str, bias.ins)] != [item.dim.name]:
            dims = ", ".join(map(str, (*bias.outs, *bias.ins)))
            label = f"has [{dims}], not [{item.dim}]"
            raise wrong("E0307", "each expert has one bias", bias.span, label, f"write {example}")
        moved = check_range(item, RATE, float(str(rate)))
        number = [*self._loads].index(id(item))
        return (self._draft.parameters.declare_biases(bias, moved, number),)


def _check_groups(program: Program, item: tree.Route, attrs: Mapping[str, object]) -> None:
    """Groups are equal, and the groups that are chosen from hold enough experts."""
    experts = item.dim.name
    size, count = program.size(experts), program.size(program.dim(experts).chosen)
    groups, among = int(str(attrs.get("groups", 1))), int(str(attrs.get("from", 1)))
    if groups < 1 or size % groups:
        raise _impossible(item, f"{size} experts do not make {groups} equal groups")
    if not 1 <= among <= groups:
        raise _impossible(item, f"{among} of {groups} groups cannot be chosen from")
    available = size // groups * among
    if count > available:
        raise _impossible(
            item,
            f"{among} of {groups} groups have {available} experts: {count} cannot be chosen",
        )


def _without_first(dims: Sequence[str]) -> str:
    """Dims as a message shows them, without the first: the experts, which plans do not write."""
    return f"[{', '.join(dims[1:])}]"


def _without_biases(call: tree.Call) -> tuple[tree.Call, tree.Expr | None]:
    """A call without its argument `bias`, and the value of that argument."""
    biases = [argument for argument in call.kwargs if argument.key.name == "bias"]
    if not biases:
        return call, None
    if len(biases) > 1:
        raise wrong(
            "E0606", f"`{TOP.name}` takes `bias` once", biases[1].key.span, "the second value"
        )
    others = tuple(argument for argument in call.kwargs if argument is not biases[0])
    return evolve(call, kwargs=others), biases[0].value


def _impossible(item: tree.Route, what: str) -> PlanError:
    return wrong("E0316", what, item.by.span, f"a choice of `{item.dim}`")
