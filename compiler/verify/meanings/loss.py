"""Cross entropy, whole and in parts: log Σ exp(logits − peak) − (logits[label] − peak), over tokens with a label."""

import numpy as np

from ..tensors import Dims, Tensor
from .call import Call, Meaning


def _valid(c: Call, labels: Tensor, dims: Dims) -> Tensor:
    """One where a token has a label, else zero."""
    return c.numbers.constant((labels.onto(dims) >= 0).astype(int), dims)


def _peak(c: Call, logits: Tensor) -> Tensor:
    values, keys = np.broadcast_arrays(logits.array, c.numbers.rank(logits))
    peak = np.take_along_axis(values, keys.argmax(axis=-1, keepdims=True), axis=-1)
    return Tensor(logits.dims[:-1], peak[..., 0], logits.degree)


def _parts(c: Call, logits: Tensor, peak: Tensor, hot: Tensor) -> tuple[Tensor, Tensor]:
    """z and t; a label among classes elsewhere adds zero to t."""
    n, tokens = c.numbers, logits.dims[:-1]
    z = n.product(tokens, n.exponential(logits, peak))
    below = n.total(logits.dims, logits, n.negative(peak))
    return z, n.product(tokens, hot, below)


def _parts_dx(c: Call, dz: Tensor, dt: Tensor, logits: Tensor, peak: Tensor, hot: Tensor) -> Tensor:
    n, dims = c.numbers, logits.dims
    return n.total(dims, n.product(dims, dz, n.exponential(logits, peak)), n.product(dims, dt, hot))


def _loss(c: Call, z: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    n = c.numbers
    return n.product((), n.total(z.dims, n.function("log", z), n.negative(t)), _valid(c, labels, z.dims))


def _loss_dx(c: Call, dy: Tensor, z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    n = c.numbers
    each = n.product(z.dims, dy, _valid(c, labels, z.dims))
    return n.product(z.dims, each, n.inverse(z)), n.negative(each)


def _whole_dx(c: Call, dy: Tensor, logits: Tensor, labels: Tensor, hot: Tensor) -> Tensor:
    peak = _peak(c, logits)
    z, _ = _parts(c, logits, peak, hot)
    return _parts_dx(c, *_loss_dx(c, dy, z, labels), logits, peak, hot)


def _hot(c: Call, labels: int, logits: int) -> Tensor:
    return c.hot(labels, logits, c.types[logits].dims[-1])


def _cross_entropy(c: Call) -> list[Tensor]:
    logits, labels = c.args
    return [_loss(c, *_parts(c, logits, _peak(c, logits), _hot(c, 1, 0)), labels)]


def _cross_entropy_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    logits, labels = c.args
    return [_whole_dx(c, grads[0], logits, labels, _hot(c, 1, 0)), None]


def _cross_entropy_dx(c: Call) -> list[Tensor]:
    dy, logits, labels = c.args
    return [_whole_dx(c, dy, logits, labels, _hot(c, 2, 1))]


def _softmax_parts(c: Call) -> list[Tensor]:
    logits, peak, _ = c.args
    return [*_parts(c, logits, peak, _hot(c, 2, 0))]


def _softmax_parts_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    (dz, dt), (logits, peak, _) = grads, c.args
    return [_parts_dx(c, dz, dt, logits, peak, _hot(c, 2, 0)), None, None]


def _softmax_parts_dx(c: Call) -> list[Tensor]:
    dz, dt, logits, peak, _ = c.args
    return [_parts_dx(c, dz, dt, logits, peak, _hot(c, 4, 2))]


def _token_loss_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    z, _, labels = c.args
    return [*_loss_dx(c, grads[0], z, labels), None]


MEANINGS = {
    "cross_entropy": Meaning(_cross_entropy, _cross_entropy_gradients),
    "cross_entropy_dx": Meaning(_cross_entropy_dx),
    "max_logit": Meaning(lambda c: [_peak(c, c.args[0])], lambda c, grads: [None]),
    "softmax_parts": Meaning(_softmax_parts, _softmax_parts_gradients),
    "softmax_parts_dx": Meaning(_softmax_parts_dx),
    "token_loss": Meaning(lambda c: [_loss(c, *c.args)], _token_loss_gradients),
    "token_loss_dx": Meaning(lambda c: [*_loss_dx(c, *c.args)]),
}
