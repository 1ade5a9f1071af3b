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

    @property
    def is_softmax(self) -> bool:
        return self.c.get("score") == "softmax"

    def _scores(self) -> Tensor:
        if self.is_softmax:
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
        n, scale = self.n, self.c.ratio("scale")
        if self.c.get("normalise") == "off":
            return n.product(self.dims, self.picked, scale)
        return n.product(self.dims, self.picked, self._over(), scale)

    def _over(self) -> Tensor:
        """1 / the sum of a token's chosen scores."""
        return self.n.function("reciprocal", self.n.product(self.dims[:-1], self.picked))

    def gradient(self, grad: Tensor) -> Tensor:
        """The gradient of the logits."""
        n, scale = self.n, self.c.ratio("scale")
        grad = n.product(self.dims, grad, scale)
        if self.c.get("normalise") == "on":
            over = self._over()
            mean = n.negative(n.product(self.dims[:-1], grad, self.picked, over))
            grad = n.product(self.dims, n.total(self.dims, grad, mean), over)
        scores = n.product(self.every, self.hot, grad)
        if not self.is_softmax:
            return n.product(self.every, scores, n.function("sigmoid slope", self.logits))
        mean = n.negative(n.product(self.every[:-1], scores, self.scores))
        return n.product(self.every, self.scores, n.total(self.every, scores, mean))


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


class _Balance:
    """by · Σ f · P, where f is experts / (k · length) times how many tokens of a sequence chose
    an expert.
    """

    def __init__(self, c: Call) -> None:
        self.c, self.n = c, c.numbers
        self.logits, ids = c.args
        self.dims = self.logits.dims
        experts, k = c.world.dims[self.dims[-1]], c.world.dims[ids.dims[-1]]
        length = c.world.dims[SEQUENCE]
        axes = c.types[0].axes_of(SEQUENCE)
        self.per = tuple(dim for dim in self.dims if dim != SEQUENCE)
        along = ids.dims.index(SEQUENCE) - len(ids.dims) - 1
        hot = np.eye(experts, dtype=int)[ids.array].sum(axis=(along, -2))
        counts = Tensor(self.per, hot)
        if axes:
            counts = c.world.coerce(counts, axes, PARTIAL, INVARIANT, self.n)
        share = self.n.ratio(experts, k * length * length)
        numbers = self.n.constant(counts.array, self.per)
        self.f = self.n.product(self.per, numbers, share, c.ratio("by"))

    def value(self) -> Tensor:
        return self.n.product((), self.f, _shares(self.c))

    def gradient(self, grad: Tensor) -> Tensor:
        return self.n.product(self.dims, grad, _of_shares(self.c, self.f))


def _shares(c: Call) -> Tensor:
    """Scores of each token, the logits' first operand; their sum is 1."""
    n, logits = c.numbers, c.args[0]
    if c.get("score") == "softmax":
        return n.softmax(logits)
    plain = n.function("sigmoid", logits)
    over = n.function("reciprocal", n.product(logits.dims[:-1], plain))
    return n.product(logits.dims, plain, over)


def _of_shares(c: Call, grad: Tensor) -> Tensor:
    """The gradient of logits from `grad`, the gradient of the sums of their shares."""
    n, logits, scores = c.numbers, c.args[0], _shares(c)
    dims = logits.dims
    slope = scores
    if c.get("score") != "softmax":
        over = n.function("reciprocal", n.product(dims[:-1], n.function("sigmoid", logits)))
        slope = n.product(dims, n.function("sigmoid slope", logits), over)
    mean = n.negative(n.product(dims[:-1], grad, scores))
    return n.product(dims, slope, n.total(dims, grad, mean))


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


def _aux_loss_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    return [c.numbers.product(c.args[0].dims, grads[0], _group_choices(c)), None]


def _logsumexp(c: Call) -> Tensor:
    total = c.numbers.product(c.args[0].dims[:-1], c.numbers.exponential(c.args[0]))
    return c.numbers.function("log", total)


def _router_z(c: Call) -> list[Tensor]:
    log = _logsumexp(c)
    return [c.numbers.product((), log, log, c.ratio("by"))]


def _router_z_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    n, x = c.numbers, c.args[0]
    total = n.function("reciprocal", n.product(x.dims[:-1], n.exponential(x)))
    factors = n.ratio(2, 1), c.ratio("by"), _logsumexp(c), n.exponential(x), total
    return [n.product(x.dims, grads[0], *factors)]


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
        x = c.world.coerce(x, (axis,), place, REPLICATED, c.numbers)
    for axis, place in reversed(_innermost_first(target, dims)):
        x = c.world.coerce(x, (axis,), REPLICATED, place, c.numbers)
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


def _exchange_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    """Gradients go the way back."""
    return [_move_rows(c, grads[0], c.op.outputs[0].type, c.types[0]), *[None] * len(c.args[1:])]


def _only(c: Call, rows: Tensor, order: Tensor) -> Tensor:
    """The rows that there are by an order."""
    return c.numbers.product(rows.dims, rows, _are_held(c, order))


def _are_held(c: Call, order: Tensor) -> Tensor:
    """One for each row that there is by an order, else zero."""
    return c.numbers.constant(order.array.sum(axis=-1), order.dims[:-1])


def _hot(c: Call, order: Tensor) -> Tensor:
    """An order as numbers."""
    return c.numbers.constant(order.array, order.dims)


def _rows(c: Call, dims: Dims, x: Tensor) -> Tensor:
    return c.numbers.product(dims, _hot(c, c.args[1]), x)


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


def _add_bias_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    bias = c.args[1]
    return [grads[0], c.numbers.product(bias.dims, grads[0]), *[None] * len(c.args[2:])]


def _products_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    x, w, *orders = c.args
    dx = c.numbers.product(x.dims, grads[0], w)
    dw = c.numbers.product(w.dims, grads[0], x)
    return [dx, dw, *[None] * len(orders)]


def _sum(c: Call) -> list[Tensor]:
    rows, gates, order = c.args
    return [c.numbers.product(c.dims, _hot(c, order), gates, rows)]


def _sum_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    (rows, gates, order), (grad,) = c.args, grads
    hot, n = _hot(c, order), c.numbers
    d_rows = n.product(rows.dims, hot, gates, grad) if c.wants(0) else None
    d_gates = n.product(gates.dims, hot, rows, grad) if c.wants(1) else None
    return [d_rows, d_gates, None]


MEANINGS = {
    "top": Semantics(
        _top, lambda c, grads: [_Choice(c).gradient(grads[0]), *[None] * len(c.args[1:])]
    ),
    "no_loss": Semantics(lambda c: [c.zero(c.op.outputs[0].type)], lambda c, grads: [None]),
    "no_load": Semantics(lambda c: [c.zero(c.op.outputs[0].type)], lambda c, grads: [None]),
    "add_load": Semantics(_add_load, lambda c, grads: [None, None]),
    "balance": Semantics(
        lambda c: [_Balance(c).value()], lambda c, grads: [_Balance(c).gradient(grads[0]), None]
    ),
    "no_scores": Semantics(lambda c: [c.zero(c.op.outputs[0].type)], lambda c, grads: [None]),
    "no_choices": Semantics(lambda c: [c.zero(c.op.outputs[0].type)], lambda c, grads: [None]),
    "sum_scores": Semantics(_sum_scores, lambda c, grads: [_of_shares(c, grads[0])]),
    "add_choices": Semantics(_add_choices, lambda c, grads: [None, None]),
    "aux_loss": Semantics(_aux_loss, _aux_loss_gradients),
    "router_z": Semantics(_router_z, _router_z_gradients),
    "limit_capacity": Semantics(_capacity, lambda c, grads: [None]),
    "sort_by_expert": Semantics(_order, lambda c, grads: [None]),
    "exchange_counts": Semantics(_exchange, lambda c, grads: [None]),
    "dispatch": Semantics(
        lambda c: [_rows(c, c.dims, c.args[0])],
        lambda c, grads: [_rows(c, grads[0].dims[1:], grads[0]), None],
    ),
    "exchange": Semantics(_exchange, _exchange_gradients),
    "exchange_back": Semantics(_exchange, _exchange_gradients),
    "exchange_padded": Semantics(_exchange, _exchange_gradients),
    "wait": Semantics(lambda c: [c.args[0]], lambda c, grads: [grads[0]]),
    "grouped_contract": Semantics(_products, _products_gradients),
    "grouped_bias": Semantics(_add_bias, _add_bias_gradients),
    "combine": Semantics(_sum, _sum_gradients),
}
