"""Cross entropy, whole and in parts: log Σ exp(logits − peak) − (logits[label] − peak), over tokens with a label.

Label smoothing takes a mean of logits for a share s of the label's; a z-loss adds ζ · (log Σ exp(logits))².  Sums,
means and maxima go over the classes that are no padding.
"""

from fractions import Fraction

import numpy as np

from ..numbers import Numbers
from ..tensors import Dims, Tensor
from .call import Call, Meaning


class _Logits:
    """The logits of a call, the operand `at`: which of a rank's classes are one, and how much each is the label."""

    def __init__(self, c: Call, at: int) -> None:
        self.n, self.x = c.numbers, c.args[at]
        self.dims, self.tokens = self.x.dims, self.x.dims[:-1]
        classes = self.dims[-1]
        self._real = c.indices(at, classes) < c.program.valid(classes)
        self.classes = c.numbers.constant(self._real.astype(int), (classes,))

    def peak(self) -> Tensor:
        """The largest."""
        real = Tensor(self.dims[-1:], self._real).onto(self.dims)
        values, keys, real = np.broadcast_arrays(self.x.array, self.n.rank(self.x), real)
        best = np.where(real, keys, keys.min()).argmax(axis=-1, keepdims=True)
        return Tensor(self.tokens, np.take_along_axis(values, best, axis=-1)[..., 0], self.x.degree)

    def exponential(self, peak: Tensor) -> Tensor:
        return self.n.product(self.dims, self.n.exponential(self.x, peak), self.classes)


class _Labelled(_Logits):
    """Logits with labels, the operand `labels`; the op's smoothing."""

    def __init__(self, c: Call, at: int, labels: int) -> None:
        super().__init__(c, at)
        classes = self.dims[-1]
        share, n = Fraction(c.number("smoothing")), c.numbers
        hot = n.product(self.dims, c.hot(labels, at, classes), _number(n, 1 - share))
        each = n.product((classes,), self.classes, _number(n, share / c.program.valid(classes)))
        self.target = n.total(self.dims, hot, each)

    def parts(self, peak: Tensor) -> tuple[Tensor, Tensor]:
        """z and t; a label among classes elsewhere adds zero to t."""
        below = self.n.total(self.dims, self.x, self.n.negative(peak))
        return self.n.product(self.tokens, self.exponential(peak)), self.n.product(self.tokens, self.target, below)

    def gradient(self, dz: Tensor, dt: Tensor, peak: Tensor) -> Tensor:
        """The gradient of the logits from those of z and t."""
        n = self.n
        through = n.product(self.dims, dz, self.exponential(peak))
        return n.total(self.dims, through, n.product(self.dims, dt, self.target))


def _number(n: Numbers, value: Fraction) -> Tensor:
    return n.ratio(value.numerator, value.denominator)


def _valid(c: Call, labels: Tensor, dims: Dims) -> Tensor:
    """One where a token has a label, else zero."""
    return c.numbers.constant((labels.onto(dims) >= 0).astype(int), dims)


# ---- tokens; `peak` is there where a z-loss is


def _normaliser(c: Call, z: Tensor, *peak: Tensor) -> Tensor:
    """log z, of which the logits have lost the peak."""
    return c.numbers.total(z.dims, c.numbers.function("log", z), *peak)


def _loss(c: Call, z_loss: float, z: Tensor, t: Tensor, labels: Tensor, *peak: Tensor) -> Tensor:
    n = c.numbers
    terms = [_normaliser(c, z), n.negative(t)]
    if peak:
        log = _normaliser(c, z, *peak)
        terms.append(n.product(z.dims, log, log, _number(n, Fraction(z_loss))))
    return n.product((), n.total(z.dims, *terms), _valid(c, labels, z.dims))


def _loss_dx(c: Call, z_loss: float, dy: Tensor, z: Tensor, labels: Tensor, *peak: Tensor) -> tuple[Tensor, Tensor]:
    n = c.numbers
    each = n.product(z.dims, dy, _valid(c, labels, z.dims))
    through = each
    if peak:
        twice = _number(n, 2 * Fraction(z_loss))
        through = n.total(z.dims, each, n.product(z.dims, each, _normaliser(c, z, *peak), twice))
    return n.product(z.dims, through, n.inverse(z)), n.negative(each)


# ---- whole


def _whole(c: Call) -> Tensor:
    logits, labels = _Labelled(c, 0, 1), c.args[1]
    peak, z_loss = logits.peak(), c.number("z")
    return _loss(c, z_loss, *logits.parts(peak), labels, *([peak] if z_loss else []))


def _whole_dx(c: Call, dy: Tensor, at: int) -> Tensor:
    """Of the logits, the operand `at`, and the labels behind them."""
    logits, labels = _Labelled(c, at, at + 1), c.args[at + 1]
    peak, z_loss = logits.peak(), c.number("z")
    z, _ = logits.parts(peak)
    return logits.gradient(*_loss_dx(c, z_loss, dy, z, labels, *([peak] if z_loss else [])), peak)


# ---- in parts


def _softmax_parts_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    dz, dt = grads
    return [_Labelled(c, 0, 2).gradient(dz, dt, c.args[1]), None, None]


def _softmax_parts_dx(c: Call) -> list[Tensor]:
    dz, dt, _, peak, _ = c.args
    return [_Labelled(c, 2, 4).gradient(dz, dt, peak)]


def _token_loss_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    z, _, *rest = c.args
    return [*_loss_dx(c, c.number("z_loss"), grads[0], z, *rest), *(None for _ in rest)]


MEANINGS = {
    "cross_entropy": Meaning(lambda c: [_whole(c)], lambda c, grads: [_whole_dx(c, grads[0], 0), None]),
    "cross_entropy_dx": Meaning(lambda c: [_whole_dx(c, c.args[0], 1)]),
    "max_logit": Meaning(lambda c: [_Logits(c, 0).peak()], lambda c, grads: [None]),
    "softmax_parts": Meaning(lambda c: [*_Labelled(c, 0, 2).parts(c.args[1])], _softmax_parts_gradients),
    "softmax_parts_dx": Meaning(_softmax_parts_dx),
    "token_loss": Meaning(lambda c: [_loss(c, c.number("z_loss"), *c.args)], _token_loss_gradients),
    "token_loss_dx": Meaning(lambda c: [*_loss_dx(c, c.number("z_loss"), *c.args)]),
}
