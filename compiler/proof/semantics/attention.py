"""Rotary positions, and softmax attention with key/value heads that serve several query heads."""

import numpy as np
from attrs import evolve

from ...ir import PARTIAL, REPLICATED, SEQUENCE, sharded
from ...ir.placements import Step
from ...ops.attention import attention_roles, documents_and_draws
from ...ops.rope import rope_roles
from ..tensors import Array, Dims, Tensor
from .call import Call, Semantics
from .dropout import keep_factors
from .join import join_tensors

KEY, GROUP = "key", "group"
"""The dims of keys beside queries, and of key/value heads beside query heads."""


def _rotate(c: Call, x: Tensor, sign: int) -> Tensor:
    """Pairs (x[i], x[i + d/2]) of the last dim, or of its first few, turned by angles that
    positions give.
    """
    if few := int(c.number("dims")):
        first, last = np.split(x.array, [few], axis=-1)
        turned = _rotate_all(c, Tensor(x.dims, first, x.degree), sign)
        return join_tensors([turned, Tensor(x.dims, last, x.degree)], x.dims)
    return _rotate_all(c, x, sign)


def _rotate_all(c: Call, x: Tensor, sign: int) -> Tensor:
    n, last, half = c.numbers, x.dims[-1], x.array.shape[-1] // 2
    scaling = (
        c.get("scaling"),
        *(c.number(name) for name in ("factor", "low", "high", "original")),
    )
    position = rope_roles(c.types, c.op).query_seq
    cos, sin = n.angles(c.indices(0, position), half, c.number("theta"), scaling)
    cos = Tensor((position, last), cos.array, cos.degree)
    sin = Tensor((position, last), sin.array, sin.degree)
    back = n.negative(sin)
    ahead, opposite = (sin, back) if sign > 0 else (back, sin)
    first = Tensor(x.dims, x.array[..., :half], x.degree)
    second = Tensor(x.dims, x.array[..., half:], x.degree)
    low = n.total(x.dims, n.product(x.dims, first, cos), n.product(x.dims, second, opposite))
    high = n.total(x.dims, n.product(x.dims, second, cos), n.product(x.dims, first, ahead))
    return join_tensors([low, high], x.dims)


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
        self.q, self.keys = q, k
        self.of_keys = {roles.key_seq: KEY, few: GROUP}
        self.pick = self._group(c.indices(0, self.heads), c.indices(1, few), few)
        self.k = self.spread(k)
        self.scale = self._scale(q)
        self.pairs: Dims = (*(dim for dim in q.dims[:-1] if dim != self.at), self.at, KEY)
        queries, keys = c.indices(0, self.at), c.indices(1, roles.key_seq)
        places = [(self.heads, c.indices(0, self.heads)), (self.at, queries), (KEY, keys)]
        self.p = self._weights(queries, keys)
        self.kept = list[Tensor]()
        self.left = self.p
        if draws:
            # only ops that have draws have the attribute
            share = c.number("dropout")
            self.kept = [keep_factors(c, of_samples, share, places) for of_samples in draws]
            self.left = self.n.product(self.pairs, self.p, *self.kept)

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
        return self.n.product(many, self.pick, Tensor(few, x.array, x.degree))

    def _few(self, x: Tensor) -> Dims:
        """The dims of keys or values, named apart from the dims of queries."""
        return tuple(self.of_keys.get(dim, dim) for dim in x.dims)

    def _weights(self, queries: Array, keys: Array) -> Tensor:
        n = self.n
        scores = n.product(self.pairs, self.q, self.scale, self.k)
        self.slope: Tensor | None = None
        if cap := self.c.number("softcap"):
            self.slope = n.function("softcap slope", scores, constants=(cap,))
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
        return self.n.product((*self.q.dims[:-1], self.v.dims[-1]), self.left, self.spread(self.v))

    def gradients(self, dy: Tensor, result: Tensor) -> list[Tensor]:
        """dq, dk and dv (Dao 2023, appendix)."""
        n = self.n
        dp = n.product(self.pairs, dy, self.spread(self.v), *self.kept)
        mean = n.negative(n.product(self.pairs[:-1], dy, result))
        ds = n.product(self.pairs, self.p, n.total(self.pairs, dp, mean), self.scale)
        if self.slope:
            ds = n.product(self.pairs, ds, self.slope)
        dk, dv = self._back(ds, self.q, self.keys), self._back(self.left, dy, self.v)
        return [n.product(self.q.dims, ds, self.k), dk, dv]

    def _back(self, pairs: Tensor, x: Tensor, like: Tensor) -> Tensor:
        """The gradient of keys or values, summed over the query heads of a group."""
        grad = self.n.product(self._few(like), pairs, x, self.pick)
        return Tensor(like.dims, grad.array, grad.degree)


def _gather_keys(c: Call) -> Call:
    """The call with the keys and values of all ranks of its ring."""
    types, args = [*c.types], [*c.args]
    for i in (1, 2):
        step = Step(c.op.names("ring"), sharded(SEQUENCE), REPLICATED)
        args[i] = c.world.coerce(c.args[i], step.axes, step.source, step.target, c.numbers)
        types[i] = step.type_after(c.types[i], c.program)
    return evolve(c, args=args, types=types)


def _ring_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    """Gradients; the gradients of keys and values are sums over the ranks, and each rank has its
    part.
    """
    dq, *others = _Softmax(_gather_keys(c)).gradients(grads[0], c.results[0])
    scatter = (c.op.names("ring"), PARTIAL, sharded(SEQUENCE), c.numbers)
    parts = [c.world.coerce(grad, *scatter) for grad in others]
    return [dq, *parts, *[None] * len(c.args[3:])]


def _gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    return [*_Softmax(c).gradients(grads[0], c.results[0]), *[None] * len(c.args[3:])]


MEANINGS = {
    "rope": Semantics(
        lambda c: [_rotate(c, c.args[0], 1)], lambda c, grads: [_rotate(c, grads[0], -1)]
    ),
    "attention": Semantics(lambda c: [_Softmax(c).result()], _gradients),
    "ring_attention": Semantics(lambda c: [_Softmax(_gather_keys(c)).result()], _ring_gradients),
}
