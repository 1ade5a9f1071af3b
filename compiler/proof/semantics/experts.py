"""A mixture of experts as formulas on dense tensors, zero where a token did not choose the expert.

Which experts are the best is an order that each trial keys anew.
"""

from math import ceil

import numpy as np

from ...ir import BATCH, INVARIANT, PARTIAL, REPLICATED, SEQUENCE, Placement, Type, sharded
from ...ops.experts import moves
from ..tensors import Array, Dims, Tensor
from .call import Call, Semantics


class _Choice:
    """Scores of the experts of each token, and the chosen ones."""

    def __init__(self, c: Call) -> None:
        self.c, self.n, self.logits, self.biases = c, c.numbers, c.args[0], c.args[1:]
        self.every, self.chosen = self.logits.dims, str(c.get("to"))
        self.dims: Dims = (*self.every[:-1], self.chosen)
        self.scores = self._scores()
        self.compared = self.n.total(self.every, self.scores, *self.biases)
        self.ids = self._best()
        is_chosen = np.eye(self.logits.array.shape[-1], dtype=int)[self.ids]
        self.hot = self.n.constant(is_chosen, (*self.dims, self.every[-1]))
        self.picked = self.n.product(self.dims, self.hot, self.scores)

    def _scores(self) -> Tensor:
        if self.c.get("score") == "softmax":
            return self.n.softmax(self.logits)
        return self.n.function("sigmoid", self.logits)

    def _best(self) -> Array:
        """The ids of the chosen experts, the best first: only from the groups whose two best are
        the best.
        """
        keys = self.n.rank(self.compared)
        groups, among = int(self.c.number("groups")), int(self.c.number("from"))
        if among < groups:
            keys = np.where(self._in_best_groups(keys, groups, among), keys, keys.dtype.type(0))
        best_first = np.argsort(keys, axis=-1, kind="stable")[..., ::-1]
        return best_first[..., : self.c.world.dims[self.chosen]]

    def _in_best_groups(self, keys: Array, groups: int, among: int) -> Array:
        *lead, size = self.compared.array.shape
        grouped = (*lead, groups, size // groups)
        two = np.argsort(keys.reshape(grouped), axis=-1)[..., -2:]
        best = np.take_along_axis(self.compared.array.reshape(grouped), two, axis=-1)
        dims: Dims = (*self.every[:-1], "group")
        parts = (Tensor(dims, best[..., i]) for i in range(best.shape[-1]))
        order = np.argsort(self.n.rank(self.n.total(dims, *parts)), axis=-1)[..., -among:]
        chosen = (order[..., None] == np.arange(groups)).any(axis=-2)
        return np.repeat(chosen, size // groups, axis=-1)

    def gates(self) -> Tensor:
        """The chosen scores, over their sum if the op says so."""
        factors = [self.picked, self.c.ratio("scale")]
        if self.c.get("normalise") == "on":
            total = self.n.product(self.dims[:-1], self.picked)
            factors.append(self.n.function("reciprocal", total))
        return self.n.product(self.dims, *factors)


def _top(c: Call) -> list[Tensor]:
    choice = _Choice(c)
    return [choice.gates(), Tensor(choice.dims, choice.ids)]


def _capacity(c: Call) -> list[Tensor]:
    """The choices, -1 where the tokens before in the sequence have filled the expert."""
    (ids,), (type,) = c.args, c.types
    axes, along = type.axes_of(SEQUENCE), ids.dims.index(SEQUENCE) - len(ids.dims)
    whole = ids
    if axes:
        whole = c.world.coerce(ids, axes, sharded(SEQUENCE), REPLICATED, c.numbers)
    experts, k = c.world.dims[str(c.get("experts"))], c.world.dims[ids.dims[-1]]
    most = ceil(c.number("capacity") * c.world.dims[SEQUENCE] * k / experts)
    hot = np.moveaxis(np.eye(experts, dtype=int)[whole.array].sum(axis=-2), along, 0)
    before = np.moveaxis(np.cumsum(hot, axis=0) - hot, 0, along)
    full = np.take_along_axis(before, whole.array, axis=-1) >= most
    limited = Tensor(ids.dims, np.where(full, -1, whole.array))
    if axes:
        limited = c.world.coerce(limited, axes, REPLICATED, sharded(SEQUENCE), c.numbers)
    return [limited]


def _add_load(c: Call) -> list[Tensor]:
    """The rows of the load after its first, and then how many tokens chose each expert; as
    numbers, which add up.
    """
    (load, ids), size = c.args, c.world.dims[c.args[0].dims[-1]]
    hot = ids.array[..., None] == np.arange(size)
    counts = hot.sum(axis=tuple(range(ids.lead, hot.ndim - 1)))[..., None, :]
    rows = load.array.reshape(*load.array.shape[: load.lead], -1, size)[..., 1:, :]
    lead = np.broadcast_shapes(rows.shape[:-2], counts.shape[:-2])
    counts = c.numbers.constant(counts).array
    parts = [
        np.broadcast_to(rows, (*lead, *rows.shape[-2:])),
        np.broadcast_to(counts, (*lead, *counts.shape[-2:])),
    ]
    whole = np.concatenate(parts, axis=-2)
    return [Tensor(load.dims, whole.reshape(*lead, *load.array.shape[load.lead :]))]


def _balance(c: Call) -> list[Tensor]:
    """by · Σ f · P, where f is experts / (k · length) times how many tokens of a sequence chose
    an expert.
    """
    n, (logits, ids) = c.numbers, c.args
    experts, k = c.world.dims[logits.dims[-1]], c.world.dims[ids.dims[-1]]
    length = c.world.dims[SEQUENCE]
    dims = tuple(dim for dim in logits.dims if dim != SEQUENCE)
    along = ids.dims.index(SEQUENCE) - len(ids.dims) - 1
    counts = Tensor(dims, np.eye(experts, dtype=int)[ids.array].sum(axis=(along, -2)))
    if axes := c.types[0].axes_of(SEQUENCE):
        counts = c.world.coerce(counts, axes, PARTIAL, INVARIANT, n)
    share = n.ratio(experts, k * length * length)
    f = n.product(dims, n.constant(counts.array, dims), share, c.ratio("by"))
    return [n.product((), f, _shares(c))]


def _shares(c: Call) -> Tensor:
    """Scores of each token, the logits' first operand; their sum is 1."""
    n, logits = c.numbers, c.args[0]
    if c.get("score") == "softmax":
        return n.softmax(logits)
    plain = n.function("sigmoid", logits)
    over = n.function("reciprocal", n.product(logits.dims[:-1], plain))
    return n.product(logits.dims, plain, over)


def _sum_scores(c: Call) -> list[Tensor]:
    dims = tuple(dim for dim in c.args[0].dims if dim != SEQUENCE)
    return [c.numbers.product(dims, _shares(c))]


def _add_choices(c: Call) -> list[Tensor]:
    """The counts, and how many tokens of each sequence chose each expert; as numbers, which add
    up.
    """
    choices, ids = c.args
    along = ids.dims.index(SEQUENCE) - len(ids.dims) - 1
    hot = np.eye(c.world.dims[choices.dims[-1]], dtype=int)[ids.array].sum(axis=(along, -2))
    return [c.numbers.total(choices.dims, choices, c.numbers.constant(hot, choices.dims))]


def _group_choices(c: Call) -> Tensor:
    """For each sequence the choices of its group, with the factor of the loss."""
    n, choices = c.numbers, c.args[1]
    sequences, rows = int(c.number("sequences")), int(c.number("rows"))
    experts = c.world.dims[choices.dims[-1]]
    dims = ("group", "sequence", choices.dims[-1])
    *lead, batch, _ = choices.array.shape
    grouped = choices.array.reshape(*lead, batch // sequences, sequences, experts)
    whole = n.product(("group", choices.dims[-1]), Tensor(dims, grouped, choices.degree))
    repeated = np.repeat(whole.array, sequences, axis=-2)
    of_groups = Tensor(choices.dims, repeated, whole.degree)
    return n.product(choices.dims, of_groups, n.ratio(experts, rows**2), c.ratio("by"))


def _aux_loss(c: Call) -> list[Tensor]:
    return [c.numbers.product((), c.args[0], _group_choices(c))]


def _router_z(c: Call) -> list[Tensor]:
    """by · Σ (log Σ exp(logits))², the inner sum over experts."""
    n, logits = c.numbers, c.args[0]
    log = n.function("log", n.product(logits.dims[:-1], n.exponential(logits)))
    return [n.product((), log, log, c.ratio("by"))]


def _zeros(c: Call) -> list[Tensor]:
    return [c.zero(c.op.outputs[0].type)]


def _order(c: Call) -> list[Tensor]:
    """One where a token's choice is one of the rank's experts and not past the padded rows,
    else zero.
    """
    (ids,), result = c.args, c.op.outputs[0].type
    index = Tensor(result.dims[:1], c.world.indices(result, result.dims[0]))
    order = (ids.onto(result.dims) == index.onto(result.dims)).astype(int)
    if padded := c.program.dim(result.dims[0]).padded:
        # of all microbatches, where these are one
        sequences = order.shape[result.dims.index(BATCH) - len(result.dims)]
        rows = sequences * padded // c.program.degree(result.axes_of(SEQUENCE))
        by_expert = order.reshape(*order.shape[: 1 - len(result.dims)], -1)
        order *= (np.cumsum(by_expert, axis=-1) <= rows).reshape(order.shape)
    return [Tensor(result.dims, order)]


def _move_rows(c: Call, x: Tensor, source: Type, target: Type) -> Tensor:
    """Rows to where the type says: all that is cut otherwise is put together, and cut anew."""
    dims = set[str]()
    for axis, _ in moves(c.op):
        dims |= {source.placement_on(axis).dim, target.placement_on(axis).dim}
    for axis, place in _innermost_first(source, dims):
        x = c.coerce(x, (axis,), place, REPLICATED)
    for axis, place in reversed(_innermost_first(target, dims)):
        x = c.coerce(x, (axis,), REPLICATED, place)
    return x


def _innermost_first(type: Type, dims: set[str]) -> list[tuple[str, Placement]]:
    shards = list[tuple[str, Placement]]()
    for dim in sorted(dims):
        for axis in reversed(type.axes_of(dim)):
            shards.append((axis, sharded(dim)))
    return shards


def _exchange(c: Call) -> list[Tensor]:
    """Rows that are not as the exchanged order says are other tokens'; padded ones are zero."""
    (rows, *orders), result = c.args, c.op.outputs[0].type
    if not orders:
        return [_move_rows(c, rows, c.types[0], result)]
    (order,) = orders
    if c.op.kind == "exchange_back":
        return [_move_rows(c, _only(c, rows, order), c.types[0], result)]
    return [_only(c, _move_rows(c, rows, c.types[0], result), order)]


def _only(c: Call, rows: Tensor, order: Tensor) -> Tensor:
    """The rows that there are by an order."""
    return c.numbers.product(rows.dims, rows, _are_held(c, order))


def _are_held(c: Call, order: Tensor) -> Tensor:
    """One for each row that there is by an order, else zero."""
    return c.numbers.constant(order.array.sum(axis=-1), order.dims[:-1])


def _hot(c: Call, order: Tensor) -> Tensor:
    """An order as numbers."""
    return c.numbers.constant(order.array, order.dims)


def _dispatch(c: Call) -> list[Tensor]:
    """For each place of an order, the token's row."""
    x, order = c.args
    return [c.numbers.product(c.dims, _hot(c, order), x)]


def _products(c: Call) -> list[Tensor]:
    """Products of the rows that there are; of padded rows, also of the rows that are not there."""
    x, w, *orders = c.args
    return [c.numbers.product(c.dims, *(_are_held(c, order) for order in orders), x, w)]


def _add_bias(c: Call) -> list[Tensor]:
    """Sums with biases of the rows that there are, as in products."""
    x, bias, *orders = c.args
    for order in orders:
        bias = c.numbers.product(c.dims, _are_held(c, order), bias)
    return [c.numbers.total(c.dims, x, bias)]


def _sum(c: Call) -> list[Tensor]:
    rows, gates, order = c.args
    return [c.numbers.product(c.dims, _hot(c, order), gates, rows)]


MEANINGS = {
    "top": Semantics(_top),
    "no_loss": Semantics(_zeros),
    "no_load": Semantics(_zeros),
    "add_load": Semantics(_add_load),
    "balance": Semantics(_balance),
    "no_scores": Semantics(_zeros),
    "no_choices": Semantics(_zeros),
    "sum_scores": Semantics(_sum_scores),
    "add_choices": Semantics(_add_choices),
    "aux_loss": Semantics(_aux_loss),
    "router_z": Semantics(_router_z),
    "limit_capacity": Semantics(_capacity),
    "sort_by_expert": Semantics(_order),
    "exchange_counts": Semantics(_exchange),
    "dispatch": Semantics(_dispatch),
    "exchange": Semantics(_exchange),
    "exchange_back": Semantics(_exchange),
    "exchange_padded": Semantics(_exchange),
    "wait": Semantics(lambda c: [c.args[0]]),
    "grouped_contract": Semantics(_products),
    "grouped_bias": Semantics(_add_bias),
    "combine": Semantics(_sum),
}
