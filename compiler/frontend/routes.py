"""Routes: `route y to experts by top(logits, k, …) { … }`, a body that each expert applies to the
tokens it is sent.

Purpose: the dims of choices and of logits, which no plan names; the ops before and after the body.
Non-goals: the statements of the body (`model`), which are ordinary ones on rows.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import prod

from attrs import evolve, field, frozen

from ..config.settings import DROPLESS, PADDED
from ..ir import BATCH, DATA_DIMS, FLOATS, PRECISIONS, Attr, Dim, Type
from ..ops.experts import COMBINE, DISPATCH, SORT
from ..ops.protocol import Attribute, OpDef, wide
from ..ops.routers import (
    ADD_CHOICES,
    ADD_LOAD,
    AUX_LOSS,
    BALANCE,
    CAPACITY,
    NO_CHOICES,
    NO_LOAD,
    NO_LOSS,
    NO_SCORES,
    ROUTER_Z,
    SUM_SCORES,
    TOP,
)
from ..syntax import tree
from ..syntax.diagnostics import Diagnostics, Note, PlanError, Unknown, wrong
from ..syntax.source import Span
from .arithmetic import Scalar, evaluate
from .builder import UNKNOWN
from .errors import check_dim, check_not_data
from .expressions import Expressions

CHOICES = Attribute("k", kinds=(int,))
FACTORS = tuple(
    Attribute(name, default=0.0, range=(lambda value: value >= 0, "0 or above"))
    for name in ("capacity", "balance", "z")
)
AUX_LOSS_FACTOR = Attribute("aux_loss", default=0.0, range=(lambda value: value >= 0, "0 or above"))
AUX_BATCH = Attribute(
    "aux_batch", default=1, kinds=(int,), range=(lambda value: value >= 1, "1 or above")
)
RATE = Attribute("rate", default=0.0, range=(lambda value: value > 0, "above 0"))
CALL = evolve(
    TOP,
    operands=TOP.operands[:1],
    attributes=(CHOICES, *TOP.attributes, *FACTORS, RATE, AUX_LOSS_FACTOR, AUX_BATCH),
)
"""`top` as plans write it: in the IR the number of choices is the size of a dim, and losses and
capacity are ops.
"""


def _argument_names(entry: OpDef) -> list[str]:
    """The arguments of an op that a plan writes, in their order."""
    operands = [operand.name for operand in entry.operands if not operand.implied]
    return operands + [attribute.name for attribute in entry.attributes if not attribute.implied]


PLACES = _argument_names(CALL)
"""The arguments of `top`, in the order that a plan has to write them in without their names."""

ROUTER_LOSS = "_router_loss"
"""The name in a model's scope of the sum of its routers' losses."""

SCORES, CHOSEN = "_scores_", "_choices_"
"""The beginnings of the names in a model's scope of the sums that routes to experts have made
for their auxiliary loss.
"""

LOAD = "_load"
"""The beginning of the names in a model's scope of its routes' loads."""


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
    for route, repeats in _routes(model.body):
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


def adds_to_loss(item: tree.Statement) -> bool:
    """Whether a statement has a route that adds to the loss."""
    for route, _ in _routes((item,)):
        names = {*PLACES[: len(route.by.args)]}
        names.update(argument.key.name for argument in route.by.kwargs)
        if not names.isdisjoint({"balance", "z"}):
            return True
    return False


def _routes(
    body: Sequence[object], repeats: tuple[str, ...] = ()
) -> Iterator[tuple[tree.Route, tuple[str, ...]]]:
    """The routes of a body, at any depth, each with the dims of the repeats around it."""
    for item in body:
        match item:
            case tree.Route():
                yield item, repeats
            case tree.Repeat():
                yield from _routes(item.body, (*repeats, item.dim.name))
            case tree.If():
                yield from _routes((*item.body, *item.others), repeats)
            case _:
                pass


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
    expr = _count_argument(route.by)
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


def _count_argument(call: tree.Call) -> tree.Expr | None:
    """The argument of `top` that says how many experts it chooses, by name or else by place."""
    for setting in call.kwargs:
        if setting.key.name == CHOICES.name:
            return setting.value
    return call.args[1] if len(call.args) > 1 else None


def _free_name(name: str, experts: str, used_names: set[str]) -> str:
    if name in used_names:
        name = f"{name}_{experts}"
    while name in used_names:
        name += "_"
    return name


@frozen
class _AuxLoss:
    """A route's part of the auxiliary loss: the factor, the sequences of a group, and the
    route's layers.
    """

    factor: float
    sequences: int
    layers: int
    span: Span


@frozen
class Routes(Expressions):
    """Writes the ops around the bodies of routes; the base of the class that reads statements
    (`model`).
    """

    # the names in the scope of routes' loads, by identity
    _loads: dict[int, str] = field(factory=dict[int, str])
    # by dim of experts
    _aux: dict[str, list[_AuxLoss]] = field(factory=dict[str, list["_AuxLoss"]])

    def begin(self, item: tree.Statement) -> None:
        """Begins the loads of a statement's routes, and the sum of routers' losses before the
        first that adds to it.
        """
        for route, repeats in _routes((item,)):
            with self._diagnostics.catch():
                self._begin_load(route, repeats)
                if self._has_aux_loss(route):
                    self._begin_aux_loss(route)
        if adds_to_loss(item) and ROUTER_LOSS not in self._scope.bound:
            self._scope.bound[ROUTER_LOSS] = self._builder.op(
                NO_LOSS.name, (self._first_tensor(),), (), item.span, "router_loss"
            )

    def _first_tensor(self) -> str:
        """The first value in the scope that is of numbers; UNKNOWN if there is none."""
        for name in self._scope.bound.values():
            if self._builder.types[name].dtype in FLOATS:
                return name
        return UNKNOWN

    def _tokens(self) -> str:
        """The first value in the scope that has one number for each token."""
        types = self._builder.types
        return next(name for name in self._scope.bound.values() if types[name].dims == DATA_DIMS)

    def _begin_load(self, route: tree.Route, repeats: Sequence[str]) -> None:
        name = f"{LOAD}.{len(self._loads)}"
        tokens = self._tokens()
        twins = {dim.twin: dim.name for dim in self._builder.program.dims if dim.twin}
        load_dims = (*repeats, route.dim.name)
        if not twins.keys() >= {*load_dims}:
            raise Unknown
        self._loads[id(route)] = name
        attrs = (("dims", tuple(twins[dim] for dim in load_dims)),)
        self._scope.bound[name] = self._builder.op(
            NO_LOAD.name, (tokens,), attrs, route.by.span, NO_LOAD.stem
        )

    def _has_aux_loss(self, route: tree.Route) -> bool:
        """Whether a route counts for the auxiliary loss of its experts: it has a factor that is
        not zero.
        """
        arguments = dict(zip(PLACES, route.by.args, strict=False))
        arguments |= {setting.key.name: setting.value for setting in route.by.kwargs}
        factor = arguments.get(AUX_LOSS_FACTOR.name)
        with suppress(PlanError, Unknown):  # a mistake is reported where the route is read
            return factor is not None and evaluate(factor, self._scope.numbers) != 0
        return False

    def _begin_aux_loss(self, route: tree.Route) -> None:
        """Begins the sums by sequence that routes to these experts add to."""
        experts, program = route.dim.name, self._builder.program
        if f"{SCORES}{experts}" in self._scope.bound:
            return
        tokens = self._tokens()
        dims = ("dims", (BATCH, self._logits_dim(experts)))
        dtype = wide(PRECISIONS[program.train.precision])
        double = (("dtype", dtype),) if dtype == "f64" else ()
        for beginning, entry, attrs in (
            (SCORES, NO_SCORES, (dims, *double)),
            (CHOSEN, NO_CHOICES, (dims,)),
        ):
            zeros = self._builder.op(entry.name, (tokens,), attrs, route.by.span, entry.stem)
            self._scope.bound[f"{beginning}{experts}"] = zeros

    def _logits_dim(self, experts: str) -> str:
        """The dim of experts in logits, which is their twin."""
        return next(dim.name for dim in self._builder.program.dims if dim.twin == experts)

    def names_assigned(self, route: tree.Route) -> Iterator[str]:
        """The names that a route binds anew.

        Its value, its load, and the sum of losses and the sums of scores and choices if it adds to
        them.
        """
        yield route.value.name
        if adds_to_loss(route):
            yield ROUTER_LOSS
        if id(route) in self._loads:
            yield self._loads[id(route)]
        if self._has_aux_loss(route):
            yield f"{SCORES}{route.dim.name}"
            yield f"{CHOSEN}{route.dim.name}"

    def results(self) -> tuple[str, ...]:
        """Results of a model beside its loss: the sum of its routers' losses, and loads."""
        for experts, parts in self._aux.items():
            with self._diagnostics.catch():
                self._end_aux_loss(experts, parts)
        bound = self._scope.bound
        names = [name for name in (ROUTER_LOSS, *self._loads.values()) if name in bound]
        return tuple(bound[name] for name in names)

    @contextmanager
    def route(self, item: tree.Route) -> Generator[None]:
        """Within it statements are the body's: they see the rows that it is sent, and no value of
        all tokens.
        """
        if id(item) not in self._loads:
            raise Unknown
        name, experts = item.value.name, item.dim.name
        value = self._value(item)
        gates, order = self._order(item, self._builder.types[value])
        rows = self._builder.op(DISPATCH.name, (value, order), (), item.span, f"_{name}")
        outside, self._scope.bound = self._scope.bound, {name: rows}
        padded = self._builder.program.train.experts == PADDED
        self._scope.elsewhere, self._parameters.experts = outside, experts
        self._parameters.order = () if padded else (order,)
        yield
        end = self._scope.bound[name]
        self._scope.bound, self._scope.elsewhere = outside, {}
        self._parameters.experts, self._parameters.order = "", ()
        dims_before, dims_after = self._builder.types[rows].dims, self._builder.types[end].dims
        if dims_after != dims_before:
            label = (
                f"enters as {_without_first(dims_before)}, leaves as {_without_first(dims_after)}"
            )
            raise wrong("E0305", f"`{name}` changes its dims in a route", item.value.span, label)
        outside[name] = self._builder.op(COMBINE.name, (end, gates, order), (), item.span, name)

    def _value(self, item: tree.Route) -> str:
        name, bound = item.value, self._scope.bound
        if name.name not in bound:
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
        type = self._builder.types[bound[name.name]]
        if BATCH not in type.dims or type.dtype not in FLOATS:
            raise wrong(
                "E0220",
                f"`{name}` has no tokens to route",
                name.span,
                f"its dims are [{', '.join(type.dims)}]",
            )
        self._scope.check_free(name)
        return bound[name.name]

    def _order(self, item: tree.Route, value: Type) -> tuple[str, str]:
        """The gates, and the order of rows."""
        program, experts = self._builder.program, item.dim.name
        logits, biases, attrs = self._choice_arguments(item, value)
        factors: dict[str, float] = {}
        for attribute in FACTORS:
            number = float(str(attrs.pop(attribute.name, 0)))
            factors[attribute.name] = _factor(item, attribute, number)
        aux_loss = self._aux_loss(item, attrs)
        attrs.pop(CHOICES.name, None)  # it is the size of a dim
        self._check_groups(item, attrs)
        choice = (*attrs.items(), ("to", program.dim(experts).chosen))
        gates, ids = self._builder.several(
            TOP.name, (logits, *biases), choice, item.by.span, ("gates", "ids")
        )
        self._losses(item, logits, ids, attrs, factors)
        if aux_loss.factor:
            self._add_aux_loss(experts, logits, ids, attrs, aux_loss)
        ids = self._limit_choices(item, ids, factors["capacity"])
        load = self._loads[id(item)]
        self._scope.bound[load] = self._builder.op(
            ADD_LOAD.name, (self._scope.bound[load], ids), (), item.by.span, ADD_LOAD.stem
        )
        order = self._builder.op(SORT.name, (ids,), (("to", experts),), item.by.span, SORT.stem)
        return gates, order

    def _choice_arguments(
        self, item: tree.Route, value: Type
    ) -> tuple[str, tuple[str, ...], dict[str, Attr]]:
        """A route's logits, its biases, and its other arguments by name.

        Logits are made in float32, whatever the model computes in.  `value` is the type of the
        route's value.
        """
        experts = item.dim.name
        scored = self._logits_dim(experts)
        call, bias = _without_biases(item.by)
        if str(item.by) in self._diagnostics.doubtful:  # the number of choices is not known
            raise Unknown
        with self.in_logits({experts: scored}):
            operands, arguments = self.arguments(call, CALL)
            attrs = dict(arguments)
            biases = self._biases(item, bias, attrs.get(RATE.name))
        dims = self._builder.types[operands[0]].dims
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
        train = self._builder.program.train
        if capacity:
            attrs = (("capacity", capacity), ("experts", item.dim.name))
            return self._builder.op(CAPACITY.name, (ids,), attrs, item.by.span, "ids")
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
        moved = _factor(item, RATE, float(str(rate)))
        return (self._parameters.declare_biases(bias, moved, [*self._loads].index(id(item))),)

    def _losses(
        self,
        item: tree.Route,
        logits: str,
        ids: str,
        attrs: Mapping[str, Attr],
        factors: Mapping[str, float],
    ) -> None:
        """Adds what the router's choice costs: means over the step's sequences, and over its
        tokens.
        """
        train, terms = self._builder.program.train, list[str]()
        span = item.by.span
        if factor := factors["balance"]:
            by = ("by", factor / train.global_batch)
            balance_attrs = (by, *_score(attrs))
            terms.append(self._builder.op(BALANCE.name, (logits, ids), balance_attrs, span, ""))
        if factor := factors["z"]:
            by = ("by", factor / (train.global_batch * train.seq))
            terms.append(self._builder.op(ROUTER_Z.name, (logits,), (by,), span, ""))
        if terms:
            so_far = self._scope.bound.get(ROUTER_LOSS, UNKNOWN)
            total = self._builder.op("add", (so_far, *terms), (), span, "router_loss")
            self._scope.bound[ROUTER_LOSS] = total

    def _aux_loss(self, item: tree.Route, attrs: dict[str, Attr]) -> _AuxLoss:
        """A route's part of the auxiliary loss, by arguments that are taken out of `attrs`."""
        numbers: list[float] = []
        for attribute in (AUX_LOSS_FACTOR, AUX_BATCH):
            number = float(str(attrs.pop(attribute.name, attribute.default)))
            numbers.append(_factor(item, attribute, number))
        factor, sequences = numbers
        program = self._builder.program
        microbatch = program.train.microbatch
        if factor and microbatch % sequences:
            message = (
                f"a loss over {sequences:g} sequences does not fit a microbatch of {microbatch}"
            )
            label = f"{microbatch} / {sequences:g} = {microbatch / sequences:g}"
            help = (
                f"write `microbatch = {sequences:g}` or a multiple, or an `aux_batch` that"
                " divides it"
            )
            self._diagnostics.doubt(section="loss")  # it lacks the loss that the sums are for
            raise wrong("E0310", message, item.by.span, label, help)
        layers = prod(program.size(repeat.dim) for repeat in self._parameters.repeats)
        return _AuxLoss(factor, int(sequences), layers, item.by.span)

    def _add_aux_loss(
        self, experts: str, logits: str, ids: str, attrs: Mapping[str, Attr], aux_loss: _AuxLoss
    ) -> None:
        """Adds a route's scores and choices to the sums of its experts."""
        bound, span = self._scope.bound, aux_loss.span
        first = self._aux.get(experts, [aux_loss])[0]
        if (first.factor, first.sequences) != (aux_loss.factor, aux_loss.sequences):
            message = f"two routes to `{experts}` have different `aux_loss` or `aux_batch`"
            help = (
                "the loss is over all routes to these experts: write the same in both, or"
                " other experts"
            )
            notes = (Note(first.span, "the first one"),)
            self._diagnostics.doubt(section="loss")
            raise wrong("E0606", message, span, "another loss", help, notes=notes)
        scores, choices = f"{SCORES}{experts}", f"{CHOSEN}{experts}"
        route_scores = self._builder.op(
            SUM_SCORES.name, (logits,), _score(attrs), span, SUM_SCORES.stem
        )
        bound[scores] = self._builder.op(
            "add", (bound.get(scores, UNKNOWN), route_scores), (), span, "scores"
        )
        so_far = bound.get(choices, UNKNOWN)
        bound[choices] = self._builder.op(
            ADD_CHOICES.name, (so_far, ids), (), span, ADD_CHOICES.stem
        )
        self._aux.setdefault(experts, []).append(aux_loss)

    def _end_aux_loss(self, experts: str, parts: Sequence[_AuxLoss]) -> None:
        """Adds the auxiliary loss of all routes to some experts to the loss of the routers."""
        first, train = parts[0], self._builder.program.train
        rows = train.seq * first.sequences * sum(part.layers for part in parts)
        attrs = (
            ("by", first.factor * first.sequences / train.global_batch),
            ("rows", rows),
            ("sequences", first.sequences),
        )
        bound = self._scope.bound
        sums = bound.get(f"{SCORES}{experts}", UNKNOWN), bound.get(f"{CHOSEN}{experts}", UNKNOWN)
        loss = self._builder.op(AUX_LOSS.name, sums, attrs, first.span, "router_loss")
        if ROUTER_LOSS in bound:
            loss = self._builder.op(
                "add", (bound[ROUTER_LOSS], loss), (), first.span, "router_loss"
            )
        bound[ROUTER_LOSS] = loss

    def _check_groups(self, item: tree.Route, attrs: Mapping[str, object]) -> None:
        """Groups are equal, and the groups that are chosen from hold enough experts."""
        program, experts = self._builder.program, item.dim.name
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


def _score(attrs: Mapping[str, Attr]) -> tuple[tuple[str, Attr], ...]:
    """The attribute that says how scores are made of logits, if a route has it."""
    return (("score", attrs["score"]),) if "score" in attrs else ()


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


def _factor(item: tree.Route, attribute: Attribute, value: float) -> float:
    """A factor.  Raises PlanError where it is out of its range."""
    if attribute.range and not attribute.range[0](value):
        raise wrong(
            "E0313",
            f"`{TOP.name}`'s {attribute.name} is {value:g}",
            item.by.span,
            help=attribute.range[1],
        )
    return value


def _impossible(item: tree.Route, what: str) -> PlanError:
    return wrong("E0316", what, item.by.span, f"a choice of `{item.dim}`")
