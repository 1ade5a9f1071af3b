"""Losses of routers: the costs of single choices, and an auxiliary loss over all routes to the
same experts.

Purpose: their sum, which repeats carry; sums of scores and of choices, of which the auxiliary loss
is made after the last statement.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod

from attrs import field, frozen

from ..ir import BATCH, FLOATS, PRECISIONS, Attr
from ..ops.protocol import wide
from ..ops.routers import (
    ADD_CHOICES,
    AUX_LOSS,
    BALANCE,
    NO_CHOICES,
    NO_LOSS,
    NO_SCORES,
    ROUTER_Z,
    SUM_SCORES,
)
from ..syntax import tree
from ..syntax.diagnostics import Note, PlanError, Unknown, wrong
from ..syntax.source import Span
from .arithmetic import evaluate
from .builder import UNKNOWN
from .draft import Draft
from .route_call import AUX_BATCH, AUX_LOSS_FACTOR, adds_to_loss, check_range, get_argument
from .route_dims import get_logits_dim

ROUTER_LOSS = "_router_loss"
"""The name in a model's scope of the sum of its routers' losses."""

SCORES, CHOSEN = "_scores_", "_choices_"
"""The beginnings of the names in a model's scope of the sums that routes to experts have made
for their auxiliary loss.
"""


@frozen
class AuxLoss:
    """A route's part of the auxiliary loss: the factor, the sequences of a group, and the
    route's layers.
    """

    factor: float
    sequences: int
    layers: int
    span: Span


@frozen
class RouterLosses:
    """Writes the ops of the routers' losses."""

    _draft: Draft
    # by dim of experts
    _aux: dict[str, list[AuxLoss]] = field(factory=dict[str, list["AuxLoss"]], init=False)

    def begin(self, item: tree.Statement) -> None:
        """Begins the sum of losses before the first statement that adds to it."""
        bound = self._draft.scope.bound
        if adds_to_loss(item) and ROUTER_LOSS not in bound:
            bound[ROUTER_LOSS] = self._draft.builder.op(
                NO_LOSS.name, (self._first_tensor(),), (), item.span, "router_loss"
            )

    def _first_tensor(self) -> str:
        """The first value in the scope that is of numbers; UNKNOWN if there is none."""
        for name in self._draft.scope.bound.values():
            if self._draft.builder.types[name].dtype in FLOATS:
                return name
        return UNKNOWN

    def begin_aux(self, route: tree.Route, tokens: str) -> None:
        """Begins the sums by sequence that routes to these experts add to, if the route does.

        `tokens` is a value that has one number for each token.
        """
        experts, builder = route.dim.name, self._draft.builder
        if not self._has_aux(route) or f"{SCORES}{experts}" in self._draft.scope.bound:
            return
        dims = ("dims", (BATCH, get_logits_dim(builder.program, experts)))
        dtype = wide(PRECISIONS[builder.program.train.precision])
        double = (("dtype", dtype),) if dtype == "f64" else ()
        for beginning, entry, attrs in (
            (SCORES, NO_SCORES, (dims, *double)),
            (CHOSEN, NO_CHOICES, (dims,)),
        ):
            zeros = builder.op(entry.name, (tokens,), attrs, route.by.span, entry.stem)
            self._draft.scope.bound[f"{beginning}{experts}"] = zeros

    def _has_aux(self, route: tree.Route) -> bool:
        """Whether a route counts for the auxiliary loss of its experts: it has a factor that is
        not zero.
        """
        factor = get_argument(route, AUX_LOSS_FACTOR.name)
        with suppress(PlanError, Unknown):  # a mistake is reported where the route is read
            return factor is not None and evaluate(factor, self._draft.scope.numbers) != 0
        return False

    def aux_sums(self, route: tree.Route) -> Iterator[str]:
        """The names of the sums by sequence that a route binds anew."""
        if self._has_aux(route):
            yield f"{SCORES}{route.dim.name}"
            yield f"{CHOSEN}{route.dim.name}"

    def add(
        self,
        route: tree.Route,
        logits: str,
        ids: str,
        attrs: Mapping[str, Attr],
        factors: Mapping[str, float],
    ) -> None:
        """Adds what the router's choice costs: means over the step's sequences, and over its
        tokens.
        """
        builder, bound, span = self._draft.builder, self._draft.scope.bound, route.by.span
        train, terms = builder.program.train, list[str]()
        if factor := factors["balance"]:
            by = ("by", factor / train.global_batch)
            balance_attrs = (by, *_score(attrs))
            terms.append(builder.op(BALANCE.name, (logits, ids), balance_attrs, span, ""))
        if factor := factors["z"]:
            by = ("by", factor / (train.global_batch * train.seq))
            terms.append(builder.op(ROUTER_Z.name, (logits,), (by,), span, ""))
        if terms:
            so_far = bound.get(ROUTER_LOSS, UNKNOWN)
            bound[ROUTER_LOSS] = builder.op("add", (so_far, *terms), (), span, "router_loss")

    def take_aux(self, route: tree.Route, attrs: dict[str, Attr]) -> AuxLoss:
        """A route's part of the auxiliary loss, by arguments that are taken out of `attrs`."""
        numbers: list[float] = []
        for attribute in (AUX_LOSS_FACTOR, AUX_BATCH):
            number = float(str(attrs.pop(attribute.name, attribute.default)))
            numbers.append(check_range(route, attribute, number))
        factor, sequences = numbers
        program = self._draft.builder.program
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
            # it lacks the loss that the sums are for
            self._draft.diagnostics.doubt(section="loss")
            raise wrong("E0310", message, route.by.span, label, help)
        layers = prod(program.size(repeat.dim) for repeat in self._draft.scope.repeats)
        return AuxLoss(factor, int(sequences), layers, route.by.span)

    def add_aux(
        self, experts: str, logits: str, ids: str, attrs: Mapping[str, Attr], aux_loss: AuxLoss
    ) -> None:
        """Adds a route's scores and choices to the sums of its experts, if its factor is not
        zero.
        """
        if not aux_loss.factor:
            return
        builder, bound, span = self._draft.builder, self._draft.scope.bound, aux_loss.span
        first = self._aux.get(experts, [aux_loss])[0]
        if (first.factor, first.sequences) != (aux_loss.factor, aux_loss.sequences):
            message = f"two routes to `{experts}` have different `aux_loss` or `aux_batch`"
            help = (
                "the loss is over all routes to these experts: write the same in both, or"
                " other experts"
            )
            notes = (Note(first.span, "the first one"),)
            self._draft.diagnostics.doubt(section="loss")
            raise wrong("E0606", message, span, "another loss", help, notes=notes)
        scores, choices = f"{SCORES}{experts}", f"{CHOSEN}{experts}"
        route_scores = builder.op(SUM_SCORES.name, (logits,), _score(attrs), span, SUM_SCORES.stem)
        scores_so_far = bound.get(scores, UNKNOWN)
        bound[scores] = builder.op("add", (scores_so_far, route_scores), (), span, "scores")
        choices_so_far = bound.get(choices, UNKNOWN)
        bound[choices] = builder.op(
            ADD_CHOICES.name, (choices_so_far, ids), (), span, ADD_CHOICES.stem
        )
        self._aux.setdefault(experts, []).append(aux_loss)

    def end(self) -> None:
        """Adds the auxiliary losses, which are made of all routes' sums, to the sum of losses."""
        for experts, parts in self._aux.items():
            with self._draft.diagnostics.catch():
                self._end_aux(experts, parts)

    def _end_aux(self, experts: str, parts: Sequence[AuxLoss]) -> None:
        builder, bound = self._draft.builder, self._draft.scope.bound
        first, train = parts[0], builder.program.train
        rows = train.seq * first.sequences * sum(part.layers for part in parts)
        attrs = (
            ("by", first.factor * first.sequences / train.global_batch),
            ("rows", rows),
            ("sequences", first.sequences),
        )
        sums = bound.get(f"{SCORES}{experts}", UNKNOWN), bound.get(f"{CHOSEN}{experts}", UNKNOWN)
        loss = builder.op(AUX_LOSS.name, sums, attrs, first.span, "router_loss")
        if ROUTER_LOSS in bound:
            losses = (bound[ROUTER_LOSS], loss)
            loss = builder.op("add", losses, (), first.span, "router_loss")
        bound[ROUTER_LOSS] = loss


def _score(attrs: Mapping[str, Attr]) -> tuple[tuple[str, Attr], ...]:
    """The attribute that says how scores are made of logits, if a route has it."""
    return (("score", attrs["score"]),) if "score" in attrs else ()
