"""Cross entropy, whole and in parts: log Σ exp(logits − peak) − (logits[label] − peak), over tokens with a label.

Label smoothing takes a mean of logits for a share s of the label's; a z-loss adds ζ · (log Σ exp(logits))².  Sums,
means and maxima go over the classes that are no padding.
"""

from fractions import Fraction

import numpy as np

from ..tensors import Dims, Numbers, Tensor
from .call import Call, Semantics


class Logits:
    """Logits of a call, made of its first operand: which of a rank's classes are one."""

    def __init__(self, c: Call, x: Tensor) -> None:
        self.n, self.x = c.numbers, x
        self.dims, self.tokens = x.dims, x.dims[:-1]
        classes = self.dims[-1]
        real = c.indices(0, classes) < c.program.valid(classes)
        self._real = Tensor((classes,), real).onto(self.dims)
        self.classes = c.numbers.constant(real.astype(int), (classes,))

    def peak(self) -> Tensor:
        """The largest."""
        values, keys, real = np.broadcast_arrays(self.x.array, self.n.rank(self.x), self._real)
        best = np.where(real, keys, keys.min()).argmax(axis=-1, keepdims=True)
        return Tensor(self.tokens, np.take_along_axis(values, best, axis=-1)[..., 0], self.x.degree)

    def exponential(self, peak: Tensor) -> Tensor:
        below = np.where(self._real, self.x.array, peak.onto(self.dims))  # padding above the peak could be infinite
        x = Tensor(self.dims, below, self.x.degree)
        return self.n.product(self.dims, self.n.exponential(x, peak), self.classes)


class Labelled(Logits):
    """Logits with labels, the operand `labels`, and how much each class is one of them; the op's smoothing."""

    def __init__(self, c: Call, x: Tensor, labels: int) -> None:
        super().__init__(c, x)
        classes = self.dims[-1]
        share, n = Fraction(c.number("smoothing")), c.numbers
        hot = n.product(self.dims, c.hot(labels, 0, classes), number(n, 1 - share))
        each = n.product((classes,), self.classes, number(n, share / c.program.valid(classes)))
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


class Capped(Labelled):
    """Logits that the op bounds first, if it says by what; the labels come after them."""

    def __init__(self, c: Call) -> None:
        self._slope: list[Tensor] = []
        x = c.args[0]
        if cap := c.number("cap"):
            self._slope = [c.numbers.function("softcap slope", x, constants=(cap,))]
            x = c.numbers.function("softcap", x, constants=(cap,))
        super().__init__(c, x, 1)

    def gradient(self, dz: Tensor, dt: Tensor, peak: Tensor) -> Tensor:
        """The gradient of the logits as the op takes them."""
        return self.n.product(self.dims, super().gradient(dz, dt, peak), *self._slope)


def number(n: Numbers, value: Fraction) -> Tensor:
    return n.ratio(value.numerator, value.denominator)


def _valid(c: Call, labels: Tensor, dims: Dims) -> Tensor:
    """One where a token has a label, else zero."""
    return c.numbers.constant((labels.onto(dims) >= 0).astype(int), dims)


# ---- tokens; `peak` is there where a z-loss is


def _normaliser(c: Call, z: Tensor, *peak: Tensor) -> Tensor:
    """log z, relative to the peak as the logits are."""
    return c.numbers.total(z.dims, c.numbers.function("log", z), *peak)


def token_loss(c: Call, z_loss: float, z: Tensor, t: Tensor, labels: Tensor, *peak: Tensor) -> Tensor:
    n = c.numbers
    terms = [_normaliser(c, z), n.negative(t)]
    if peak:
        log = _normaliser(c, z, *peak)
        terms.append(n.product(z.dims, log, log, number(n, Fraction(z_loss))))
    return n.product((), n.total(z.dims, *terms), _valid(c, labels, z.dims))


def token_loss_dx(
    c: Call, z_loss: float, dy: Tensor, z: Tensor, labels: Tensor, *peak: Tensor
) -> tuple[Tensor, Tensor]:
    n = c.numbers
    each = n.product(z.dims, dy, _valid(c, labels, z.dims))
    through = each
    if peak:
        twice = number(n, 2 * Fraction(z_loss))
        through = n.total(z.dims, each, n.product(z.dims, each, _normaliser(c, z, *peak), twice))
    return n.product(z.dims, through, n.inverse(z)), n.negative(each)


# ---- whole


def _whole(c: Call) -> Tensor:
    logits, z_loss = Capped(c), c.number("z")
    peak = logits.peak()
    return token_loss(c, z_loss, *logits.parts(peak), c.args[1], *([peak] if z_loss else []))


def _whole_dx(c: Call, dy: Tensor) -> Tensor:
    logits, z_loss = Capped(c), c.number("z")
    peak = logits.peak()
    z, _ = logits.parts(peak)
    return logits.gradient(*token_loss_dx(c, z_loss, dy, z, c.args[1], *([peak] if z_loss else [])), peak)


# ---- in parts


def _local_softmax_stats_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    dz, dt = grads
    return [Labelled(c, c.args[0], 2).gradient(dz, dt, c.args[1]), None, None]


def _token_loss_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    z, _, *rest = c.args
    return [*token_loss_dx(c, c.number("z_loss"), grads[0], z, *rest), *(None for _ in rest)]


MEANINGS = {
    "cross_entropy": Semantics(lambda c: [_whole(c)], lambda c, grads: [_whole_dx(c, grads[0]), None]),
    "max_logit": Semantics(lambda c: [Logits(c, c.args[0]).peak()], lambda c, grads: [None]),
    "local_softmax_stats": Semantics(
        lambda c: [*Labelled(c, c.args[0], 2).parts(c.args[1])], _local_softmax_stats_gradients
    ),
    "token_loss": Semantics(lambda c: [token_loss(c, c.number("z_loss"), *c.args)], _token_loss_gradients),
}
