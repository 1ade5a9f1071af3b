"""Rotary positions, and softmax attention with key/value heads that serve several query heads."""

import numpy as np
from attrs import evolve

from ...ir import REPLICATED, SEQUENCE, sharded
from ...ir.placements import Step
from ...ops.attention import attention_roles, documents_and_draws
from ...ops.rope import rope_roles
from ..layout import join_last_dim, rename_dims, split_last_dim
from ..tensors import Array, Dims, Tensor
from .call import Call, Semantics
from .dropout import keep_factors

KEY, GROUP = "key", "group"
"""The dims of keys beside queries, and of key/value heads beside query heads."""


def _rotate(c: Call) -> list[Tensor]:
    """Pairs (x[i], x[i + d/2]) of the last dim, or of its first few, turned by angles that
    positions give.
    """
    n, (x,) = c.numbers, c.args
    few, last = int(c.number("dims")), x.dims[-1]
    if not few:
        return [_rotate_all(c, x)]
    first, rest = split_last_dim(n, x, [few, x.array.shape[-1] - few], (last, last))
    return [join_last_dim(n, [_rotate_all(c, first), rest], x.dims)]


def _rotate_all(c: Call, x: Tensor) -> Tensor:
    n, last, half = c.numbers, x.dims[-1], x.array.shape[-1] // 2
    scaling = (
        c.get("scaling"),
        *(c.number(name) for name in ("factor", "low", "high", "original")),
    )
    position = rope_roles(c.types, c.op).query_seq
    cos, sin = n.angles(c.indices(0, position), half, c.number("theta"), scaling)
    cos = Tensor((position, last), cos.array, cos.degree)
    sin = Tensor((position, last), sin.array, sin.degree)
    first, second = split_last_dim(n, x, [half, half], (last, last))
    back = n.product(x.dims, second, n.negative(sin))
    low = n.total(x.dims, n.product(x.dims, first, cos), back)
    high = n.total(x.dims, n.product(x.dims, second, cos), n.product(x.dims, first, sin))
    return join_last_dim(n, [low, high], x.dims)


class _Softmax:
    """softmax(q·kᵀ · scale + mask) of each query head with the keys of its group, and what
    dropout leaves of it.
    """

    def __init__(self, c: Call) -> None:
        self.c, self.n = c, c.numbers
        q, k, self.v, *rest = c.args
        self.documents, draws = documents_and_draws(c.op, rest)
        roles = attention_roles(c.types, c.op)
        self.heads, self.at, few = roles.heads, roles.query_seq, roles.kv_heads
        self.q = q
        self.of_keys = {roles.key_seq: KEY, few: GROUP}
        self.pick = self._group(c.indices(0, self.heads), c.indices(1, few), few)
        self.k = self.spread(k)
        self.scale = self._scale(q)
        self.pairs: Dims = (*(dim for dim in q.dims[:-1] if dim != self.at), self.at, KEY)
        queries, keys = c.indices(0, self.at), c.indices(1, roles.key_seq)
        places = [(self.heads, c.indices(0, self.heads)), (self.at, queries), (KEY, keys)]
        self.weights = self._weights(queries, keys)
        if draws:
            # only ops that have draws have the attribute
            share = c.number("dropout")
            kept = [keep_factors(c, of_samples, share, places) for of_samples in draws]
            self.weights = self.n.product(self.pairs, self.weights, *kept)

    def _group(self, heads: Array, groups: Array, few: str) -> Tensor:
        """One where a query head belongs to a key/value head, else zero."""
        users = self.c.world.dims[self.heads] // self.c.world.dims[few]
        picked = heads[..., :, None] // users == groups[..., None, :]
        return self.n.constant(picked.astype(int), (self.heads, GROUP))

    def _scale(self, q: Tensor) -> Tensor:
        if self.c.number("scale"):
            return self.c.ratio("scale")
        width = self.n.ratio(q.array.shape[-1], 1)
        return self.n.function("reciprocal", self.n.function("root", width))

    def spread(self, x: Tensor) -> Tensor:
        """Keys or values, copied to every query head of their group."""
        few = self._few(x)
        many = tuple(self.heads if dim == GROUP else dim for dim in few)
        return self.n.product(many, self.pick, rename_dims(self.n, x, few))

    def _few(self, x: Tensor) -> Dims:
        """The dims of keys or values, named apart from the dims of queries."""
        return tuple(self.of_keys.get(dim, dim) for dim in x.dims)

    def _weights(self, queries: Array, keys: Array) -> Tensor:
        n = self.n
        scores = n.product(self.pairs, self.q, self.scale, self.k)
        if cap := self.c.number("softcap"):
            scores = n.function("softcap", scores, constants=(cap,))
        return n.softmax(scores, self._seen(queries, keys))

    def _seen(self, queries: Array, keys: Array) -> Tensor:
        """One where a query sees a key, else zero."""
        ahead = queries[..., :, None] - keys[..., None, :]
        seen = ahead == ahead
        if self.c.get("mask") == "causal":
            seen = ahead >= 0
        if window := self.c.number("window"):
            seen = seen & (np.abs(ahead) < window)
        near = self.n.constant(seen.astype(int), (self.at, KEY))
        alike = [self._alike(documents, queries) for documents in self.documents]
        if not alike:
            return near
        return self.n.product(alike[0].dims, near, *alike)

    def _alike(self, documents: Tensor, queries: Array) -> Tensor:
        """One where a query's token and a key's are of one document, else zero; `documents` has the
        documents of all keys.
        """
        rows = tuple(dim for dim in documents.dims if dim != self.at)
        ids = documents.onto((*rows, self.at))
        positions = queries.reshape(*queries.shape[:-1], *(1 for _ in rows), -1)
        lead = np.broadcast_shapes(ids.shape[:-1], positions.shape[:-1])
        all_ids = np.broadcast_to(ids, (*lead, ids.shape[-1]))
        positions = np.broadcast_to(positions, (*lead, positions.shape[-1]))
        query_ids = np.take_along_axis(all_ids, positions, axis=-1)
        alike = query_ids[..., :, None] == ids[..., None, :]
        return self.n.constant(alike.astype(int), (*rows, self.at, KEY))

    def result(self) -> Tensor:
        dims = (*self.q.dims[:-1], self.v.dims[-1])
        return self.n.product(dims, self.weights, self.spread(self.v))


def _gather_keys(c: Call) -> Call:
    """The call with the keys and values of all ranks of its ring."""
    types, args = [*c.types], [*c.args]
    for i in (1, 2):
        step = Step(c.op.names("ring"), sharded(SEQUENCE), REPLICATED)
        args[i] = c.coerce(c.args[i], step.axes, step.source, step.target)
        types[i] = step.type_after(c.types[i], c.program)
    return evolve(c, args=args, types=types)


MEANINGS = {
    "rope": Semantics(_rotate),
    "attention": Semantics(lambda c: [_Softmax(c).result()]),
    "ring_attention": Semantics(lambda c: [_Softmax(_gather_keys(c)).result()]),
}
