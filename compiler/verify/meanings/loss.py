"""Cross entropy, whole and in parts: log Σ exp(logits − peak) − (logits[label] − peak), over tokens with a label.

Sums and maxima go over the classes that are no padding.
"""

import numpy as np

from ..tensors import Dims, Tensor
from .call import Call, Meaning


class _Logits:
    """The logits of a call, the operand `at`: which of a rank's classes are one, and which is the label."""

    def __init__(self, c: Call, at: int, labels: int) -> None:
        self.n, self.x = c.numbers, c.args[at]
        self.dims, self.tokens = self.x.dims, self.x.dims[:-1]
        classes = c.types[at].dims[-1]
        self._real = c.indices(at, classes) < c.program.valid(classes)
        self.classes = c.numbers.constant(self._real.astype(int), (classes,))
        self.hot = c.hot(labels, at, classes) if labels >= 0 else None

    def peak(self) -> Tensor:
        """The largest."""
        real = Tensor(self.dims[-1:], self._real).onto(self.dims)
        values, keys, real = np.broadcast_arrays(self.x.array, self.n.rank(self.x), real)
        best = np.where(real, keys, keys.min()).argmax(axis=-1, keepdims=True)
        return Tensor(self.tokens, np.take_along_axis(values, best, axis=-1)[..., 0], self.x.degree)

    def parts(self, peak: Tensor) -> tuple[Tensor, Tensor]:
        """z and t; a label among classes elsewhere adds zero to t."""
        assert self.hot, "verify: parts of a loss without labels"
        below = self.n.total(self.dims, self.x, self.n.negative(peak))
        return self.n.product(self.tokens, self._exp(peak)), self.n.product(self.tokens, self.hot, below)

    def gradient(self, dz: Tensor, dt: Tensor, peak: Tensor) -> Tensor:
        """The gradient of the logits from those of z and t."""
        assert self.hot, "verify: parts of a loss without labels"
        n = self.n
        return n.total(self.dims, n.product(self.dims, dz, self._exp(peak)), n.product(self.dims, dt, self.hot))

    def _exp(self, peak: Tensor) -> Tensor:
        return self.n.product(self.dims, self.n.exponential(self.x, peak), self.classes)


def _valid(c: Call, labels: Tensor, dims: Dims) -> Tensor:
    """One where a token has a label, else zero."""
    return c.numbers.constant((labels.onto(dims) >= 0).astype(int), dims)


def _loss(c: Call, z: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    n = c.numbers
    return n.product((), n.total(z.dims, n.function("log", z), n.negative(t)), _valid(c, labels, z.dims))


def _loss_dx(c: Call, dy: Tensor, z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    n = c.numbers
    each = n.product(z.dims, dy, _valid(c, labels, z.dims))
    return n.product(z.dims, each, n.inverse(z)), n.negative(each)


def _whole_dx(c: Call, dy: Tensor, logits: _Logits, labels: Tensor) -> Tensor:
    peak = logits.peak()
    z, _ = logits.parts(peak)
    return logits.gradient(*_loss_dx(c, dy, z, labels), peak)


def _cross_entropy(c: Call) -> list[Tensor]:
    logits = _Logits(c, 0, 1)
    return [_loss(c, *logits.parts(logits.peak()), c.args[1])]


def _cross_entropy_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    return [_whole_dx(c, grads[0], _Logits(c, 0, 1), c.args[1]), None]


def _cross_entropy_dx(c: Call) -> list[Tensor]:
    return [_whole_dx(c, c.args[0], _Logits(c, 1, 2), c.args[2])]


def _softmax_parts(c: Call) -> list[Tensor]:
    return [*_Logits(c, 0, 2).parts(c.args[1])]


def _softmax_parts_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    dz, dt = grads
    return [_Logits(c, 0, 2).gradient(dz, dt, c.args[1]), None, None]


def _softmax_parts_dx(c: Call) -> list[Tensor]:
    dz, dt, _, peak, _ = c.args
    return [_Logits(c, 2, 4).gradient(dz, dt, peak)]


def _token_loss_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    z, _, labels = c.args
    return [*_loss_dx(c, grads[0], z, labels), None]


MEANINGS = {
    "cross_entropy": Meaning(_cross_entropy, _cross_entropy_gradients),
    "cross_entropy_dx": Meaning(_cross_entropy_dx),
    "max_logit": Meaning(lambda c: [_Logits(c, 0, -1).peak()], lambda c, grads: [None]),
    "softmax_parts": Meaning(_softmax_parts, _softmax_parts_gradients),
    "softmax_parts_dx": Meaning(_softmax_parts_dx),
    "token_loss": Meaning(lambda c: [_loss(c, *c.args)], _token_loss_gradients),
    "token_loss_dx": Meaning(lambda c: [*_loss_dx(c, *c.args)]),
}
