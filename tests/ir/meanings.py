"""What every op means, as a formula on the local operands of all ranks at once.

Purpose: the reference that the compiler's op table is held against, written from the papers and not from the compiler;
dims go by name, so that their physical order does not matter.  All but maxima and counts hold for complex numbers too,
whose imaginary part then carries a derivative (Squire and Trapp 1998).
Non-goals: placements (`placing`), control (`simulate`).
"""

from collections.abc import Callable, Sequence
from string import ascii_letters

import numpy as np

from ir.placing import Array, Held, Mesh
from scalec.compiler.ir import Op, Type

RATE = 0.5
"""The learning rate of `update`, which is plain gradient descent here."""

Meaning = Callable[[Mesh, Op, list[Held]], list[Array]]
Dims = Sequence[str]


# ---- named dims


def einsum(out: Dims, *operands: tuple[Array, Dims]) -> Array:
    """The sum of products over all dims that `out` lacks; every operand has the mesh's axes before its dims."""
    letters: dict[str, str] = {}
    words = [
        "..." + "".join(letters.setdefault(dim, ascii_letters[len(letters)]) for dim in dims)
        for dims in (*(dims for _, dims in operands), out)
    ]
    return np.einsum(f"{','.join(words[:-1])}->{words[-1]}", *(array for array, _ in operands))


def onto(array: Array, own: Dims, dims: Dims) -> Array:
    """`array` with its `own` dims in the order of `dims`, and size 1 for those it lacks."""
    array = einsum([dim for dim in dims if dim in own], (array, own))
    return np.expand_dims(array, tuple(i - len(dims) for i, dim in enumerate(dims) if dim not in own))


def _spread(held: Held, dims: Dims) -> Array:
    return onto(held.parts, held.type.dims, dims)


def _total(array: Array, dims: Dims) -> Array:
    return einsum((), (array, dims))


def _result(op: Op) -> Dims:
    return op.outputs[0].type.dims


def _number(op: Op, key: str) -> float:
    value = op.get(key)
    assert isinstance(value, int | float), f"{op.kind}: {key} is no number"
    return value


# ---- sums and products


def _add(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    return [sum((_spread(arg, _result(op)) for arg in args[1:]), _spread(args[0], _result(op)))]


def _mul(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    x, y = args
    return [_spread(x, _result(op)) * _spread(y, _result(op))]


def _sum_of_products(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    return [einsum(_result(op), *((arg.parts, arg.type.dims) for arg in args))]


def _sigmoid(x: Array) -> Array:
    """As a hyperbolic tangent, which does not overflow."""
    return 0.5 + 0.5 * np.tanh(0.5 * x)


def _silu(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    (x,) = (arg.parts for arg in args)
    return [x * _sigmoid(x)]


def _silu_dx(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    dy, x = (arg.parts for arg in args)
    s = _sigmoid(x)
    return [dy * (s + x * s * (1 - s))]


# ---- norm


def _inverse_rms(x: Held, weight: Type, eps: float) -> Array:
    over = tuple(x.type.dims.index(dim) - len(x.type.dims) for dim in weight.dims)
    return (np.mean(x.parts**2, axis=over, keepdims=True) + eps) ** -0.5


def _rmsnorm(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    x, weight = args
    return [x.parts * _inverse_rms(x, weight.type, _number(op, "eps")) * _spread(weight, x.type.dims)]


def _rmsnorm_dx(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    dy, weight, x = args
    r = _inverse_rms(x, weight.type, _number(op, "eps"))
    g = _spread(dy, x.type.dims) * _spread(weight, x.type.dims)
    over = tuple(x.type.dims.index(dim) - len(x.type.dims) for dim in weight.type.dims)
    return [r * g - x.parts * r**3 * np.mean(g * x.parts, axis=over, keepdims=True)]


def _rmsnorm_dw(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    dy, weight, x = args
    normed = x.parts * _inverse_rms(x, weight.type, _number(op, "eps"))
    return [einsum(weight.type.dims, (_spread(dy, x.type.dims) * normed, x.type.dims))]


# ---- positions and attention


def _rotation(sign: int) -> Meaning:
    def rotate(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
        (x,) = args
        half = x.parts.shape[-1] // 2
        frequency = _number(op, "theta") ** (-np.arange(half) / half)
        angle = mesh.indices(x.type, "seq")[..., None] * frequency
        angle = onto(angle, ("seq", x.type.dims[-1]), x.type.dims)
        first, second = x.parts[..., :half], x.parts[..., half:]
        cos, sin = np.cos(angle), sign * np.sin(angle)
        return [np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)]

    return rotate


def _head_dim(type: Type) -> str:
    (dim,) = (dim for dim in type.dims[:-1] if dim not in ("batch", "seq"))
    return dim


class _Attention:
    """Softmax attention of one mesh, with every query head's own keys and values copied to it."""

    def __init__(self, mesh: Mesh, q: Held, k: Held, v: Held) -> None:
        self.q, heads, few = q, _head_dim(q.type), _head_dim(k.type)
        per_group = mesh.dims[heads] // mesh.dims[few]
        of = mesh.indices(q.type, heads) // per_group
        self._pick = (of[..., :, None] == mesh.indices(k.type, few)[..., None, :]).astype(int)
        assert (self._pick.sum(axis=-1) == 1).all(), "a rank lacks the keys and values of its query heads"
        self._few = [{"seq": "key", few: "group"}.get(dim, dim) for dim in k.type.dims]
        self.many = [heads if dim == "group" else dim for dim in self._few]
        self._heads = heads
        self.scale = q.parts.shape[-1] ** -0.5
        self.k, self.v = (einsum(self.many, (self._pick, (heads, "group")), (x.parts, self._few)) for x in (k, v))
        self.pairs = [*(dim for dim in q.type.dims[:-1] if dim != "seq"), "seq", "key"]
        scores = einsum(self.pairs, (q.parts, q.type.dims), (self.k, self.many)) * self.scale
        place = mesh.indices(q.type, "seq")
        weights = np.exp(scores) * onto(place[..., :, None] >= place[..., None, :], ("seq", "key"), self.pairs)
        self.p = weights / weights.sum(axis=-1, keepdims=True)

    def result(self) -> Array:
        return einsum(self.q.type.dims, (self.p, self.pairs), (self.v, self.many))

    def gradients(self, dy: Array) -> list[Array]:
        dims = self.q.type.dims
        dp = einsum(self.pairs, (dy, dims), (self.v, self.many))
        ds = self.p * (dp - (self.p * dp).sum(axis=-1, keepdims=True)) * self.scale
        dq = einsum(dims, (ds, self.pairs), (self.k, self.many))
        return [dq, self._back(ds, self.q.parts), self._back(self.p, dy)]

    def _back(self, pairs: Array, many: Array) -> Array:
        """Summed over the query heads of a group."""
        per_head = einsum(self.many, (pairs, self.pairs), (many, self.q.type.dims))
        return einsum(self._few, (self._pick, (self._heads, "group")), (per_head, self.many))


def _attention(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    return [_Attention(mesh, *args).result()]


def _attention_dx(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    dy, q, k, v, _ = args
    return _Attention(mesh, q, k, v).gradients(dy.parts)


# ---- tables and losses


def _hot(mesh: Mesh, ids: Held, type: Type, dim: str) -> tuple[Array, Dims]:
    """One where `dim`'s index is the id, else zero."""
    dims = (*ids.type.dims, dim)
    return (_spread(ids, dims) == onto(mesh.indices(type, dim), (dim,), dims)).astype(int), dims


def _embedding(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    tokens, table = args
    hot = _hot(mesh, tokens, table.type, table.type.dims[0])
    return [einsum(_result(op), hot, (table.parts, table.type.dims))]


def _embedding_dw(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    dy, tokens, table = args
    hot = _hot(mesh, tokens, table.type, table.type.dims[0])
    return [einsum(table.type.dims, hot, (dy.parts, dy.type.dims))]


def _valid(labels: Held, dims: Dims) -> Array:
    return _spread(labels, dims) >= 0


def _label_logit(mesh: Mesh, logits: Held, labels: Held) -> Array:
    """The logit of the label, zero where the label is not among this rank's classes."""
    hot = _hot(mesh, labels, logits.type, logits.type.dims[-1])
    return einsum(logits.type.dims[:-1], hot, (logits.parts, logits.type.dims))


def _cross_entropy(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    logits, labels = args
    dims = logits.type.dims[:-1]
    loss = np.log(np.exp(logits.parts).sum(axis=-1)) - _label_logit(mesh, logits, labels)
    return [_total(loss * _valid(labels, dims), dims)]


def _cross_entropy_dx(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    dy, logits, labels = args
    dims = logits.type.dims
    exp = np.exp(logits.parts)
    hot = onto(*_hot(mesh, labels, logits.type, dims[-1]), dims)
    return [_spread(dy, dims) * _valid(labels, dims) * (exp / exp.sum(axis=-1, keepdims=True) - hot)]


def _max_logit(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    return [args[0].parts.max(axis=-1)]


def _softmax_parts(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    logits, peak, labels = args
    shifted = Held(logits.type, logits.parts - _spread(peak, logits.type.dims))
    return [np.exp(shifted.parts).sum(axis=-1), _label_logit(mesh, shifted, labels)]


def _softmax_parts_dx(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    dz, dt, logits, peak, labels = args
    dims = logits.type.dims
    hot = onto(*_hot(mesh, labels, logits.type, dims[-1]), dims)
    return [_spread(dz, dims) * np.exp(logits.parts - _spread(peak, dims)) + _spread(dt, dims) * hot]


def _token_loss(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    z, t, labels = args
    dims = z.type.dims
    return [_total(np.where(_valid(labels, dims), np.log(z.parts) - _spread(t, dims), 0), dims)]


def _token_loss_dx(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    dy, z, labels = args
    per_token = _spread(dy, z.type.dims) * _valid(labels, z.type.dims)
    return [per_token / z.parts, -per_token]


# ---- the step


def _count_valid(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    (labels,) = args
    return [_total((labels.parts >= 0).astype(int), labels.type.dims)]


def _reciprocal(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    return [1 / np.maximum(args[0].parts, 1)]


def _same(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    return [args[0].parts]


def _zeros(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    return [np.zeros_like(args[0].parts)]


def _pack(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    lead = tuple(mesh.axes.values())
    return [np.concatenate([arg.parts.reshape(*lead, -1) for arg in args], axis=-1)]


def _sum_squares(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    return [np.add.reduce([_total(arg.parts**2, arg.type.dims) for arg in args])]


def _grad_norm(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    return [np.sqrt(np.add.reduce([arg.parts for arg in args]))]


def _clip_scale(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    (norm,), most = (arg.parts for arg in args), _number(op, "max")
    return [np.where((norm > most) & (most > 0), most / np.maximum(norm, 1e-300), 1.0)]


def _update(mesh: Mesh, op: Op, args: list[Held]) -> list[Array]:
    """Gradient descent; the gradient is one parameter's, or the flat one of all."""
    grad, scale, count, *params = args
    lead = tuple(mesh.axes.values())
    flat = grad.parts.reshape(*lead, -1)
    ends = np.cumsum([param.parts[(0,) * len(lead)].size for param in params])
    assert flat.shape[-1] == ends[-1], "the gradient has not the size of its parameters"
    step = RATE * (scale.parts * (count.parts > 0))[..., None]
    moves = np.split(step * flat, ends[:-1], axis=-1)
    return [param.parts - move.reshape(param.parts.shape) for param, move in zip(params, moves, strict=True)]


MEANINGS: dict[str, Meaning] = {
    "add": _add,
    "attention": _attention,
    "attention_dx": _attention_dx,
    "cast": _same,
    "clip_scale": _clip_scale,
    "contract": _sum_of_products,
    "count_valid": _count_valid,
    "cross_entropy": _cross_entropy,
    "cross_entropy_dx": _cross_entropy_dx,
    "embedding": _embedding,
    "embedding_dw": _embedding_dw,
    "grad_norm": _grad_norm,
    "max_logit": _max_logit,
    "mul": _mul,
    "pack": _pack,
    "reciprocal": _reciprocal,
    "rmsnorm": _rmsnorm,
    "rmsnorm_dw": _rmsnorm_dw,
    "rmsnorm_dx": _rmsnorm_dx,
    "rope": _rotation(1),
    "rope_dx": _rotation(-1),
    "silu": _silu,
    "silu_dx": _silu_dx,
    "softmax_parts": _softmax_parts,
    "softmax_parts_dx": _softmax_parts_dx,
    "sum": _sum_of_products,
    "sum_squares": _sum_squares,
    "token_loss": _token_loss,
    "token_loss_dx": _token_loss_dx,
    "update": _update,
    "zeros": _zeros,
}
