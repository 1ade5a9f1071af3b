"""Cross entropy, whole and in parts: log Σ exp(logits − peak) − (logits[label] − peak), over tokens
with a label.

Label smoothing takes a mean of logits for a share s of the label's; a z-loss adds ζ · (log Σ
exp(logits))².  Sums, means and maxima go over the classes that are no padding.
"""

from fractions import Fraction

import numpy as np

from ...ir import Kind, Type, sharded
from ..layout import append_dim
from ..tensors import Dims, Tensor
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
        """exp(logit − peak), of padding zero."""
        x = self._without_padding(peak)
        return self.n.product(self.dims, self.n.exponential(x, peak), self.classes)

    def _without_padding(self, peak: Tensor) -> Tensor:
        """The logits, of padding the peak: above the peak an exponential could be infinite."""
        array = np.where(self._real, self.x.array, peak.onto(self.dims))
        return self.n.with_gradient(
            Tensor(self.dims, array, self.x.degree),
            [self.x],
            lambda grad, i: self.n.product(self.dims, grad, self.classes),
        )


class Labelled(Logits):
    """Logits with labels, the operand `labels`, and how much each class is one of them; the
    op's smoothing.
    """

    def __init__(self, c: Call, x: Tensor, labels: int) -> None:
        super().__init__(c, x)
        classes = self.dims[-1]
        of_label, every = _shares(c, classes)
        hot = c.numbers.product(self.dims, c.hot(labels, 0, classes), of_label)
        spread = c.numbers.product((classes,), self.classes, every)
        self.target = c.numbers.total(self.dims, hot, spread)

    def parts(self, peak: Tensor) -> tuple[Tensor, Tensor]:
        """z and t; a label among classes elsewhere adds zero to t."""
        below = self.n.total(self.dims, self.x, self.n.negative(peak))
        z = self.n.product(self.tokens, self.exponential(peak))
        t = self.n.product(self.tokens, self.target, below)
        return z, t


class Capped(Labelled):
    """Logits that the op bounds first, if it says by what; the labels come after them."""

    def __init__(self, c: Call) -> None:
        x = c.args[0]
        if cap := c.number("cap"):
            x = c.numbers.function("softcap", x, constants=(cap,))
        super().__init__(c, x, 1)


def _shares(c: Call, classes: str) -> tuple[Tensor, Tensor]:
    """How much of a token's target is the class of its label, and how much every class."""
    share = Fraction(c.number("smoothing"))
    of_label, every = 1 - share, share / c.program.valid(classes)
    return c.numbers.ratio(*of_label.as_integer_ratio()), c.numbers.ratio(*every.as_integer_ratio())


def _valid(c: Call, labels: Tensor, dims: Dims) -> Tensor:
    """One where a token has a label, else zero."""
    return c.numbers.constant((labels.onto(dims) >= 0).astype(int), dims)


# ---- tokens; `peak` is there where a z-loss is


def _token_loss(
    c: Call, z_loss: str, z: Tensor, t: Tensor, labels: Tensor, *peak: Tensor
) -> Tensor:
    """The loss; `z_loss` is the attribute that says how much of it a z-loss is."""
    n = c.numbers
    log = n.function("log", z)
    terms = [log, n.negative(t)]
    if peak:
        whole = n.total(z.dims, log, *peak)
        terms.append(n.product(z.dims, whole, whole, c.ratio(z_loss)))
    return n.product((), n.total(z.dims, *terms), _valid(c, labels, z.dims))


# ---- whole


def _whole(c: Call) -> list[Tensor]:
    logits = Capped(c)
    peak = logits.peak()
    z_peak = [peak] if c.number("z") else []
    return [_token_loss(c, "z", *logits.parts(peak), c.args[1], *z_peak)]


# ---- in parts, each relative to its rank's own largest logit; and how they relate to the largest
# logit of all


def _own_parts(c: Call) -> list[Tensor]:
    """m, z relative to it in a dim of its own, and t, which is relative to nothing."""
    logits = Capped(c)
    m = logits.peak()
    z = logits.n.product(logits.tokens, logits.exponential(m))
    z = append_dim(logits.n, z, str(c.get("as")))
    return [m, z, logits.n.product(logits.tokens, logits.target, logits.x)]


def _rescale(c: Call) -> list[Tensor]:
    n, (m, z, t, peak, _) = c.numbers, c.args
    lost = n.negative(n.product(t.dims, _share_of_labels(c), peak))
    return [n.product(m.dims, z, c.numbers.exponential(m, peak)), n.total(t.dims, t, lost)]


def _share_of_labels(c: Call) -> Tensor:
    """The part of each label that this rank's classes have."""
    n, labels, classes = c.numbers, c.args[4], str(c.op.get("classes"))
    m = c.types[0]
    places = tuple((axis, sharded(classes)) for axis in m.axes_in(Kind.MAXIMUM))
    index = c.world.indices(Type(m.dtype, (classes,), places), classes)
    dims = (*labels.dims, classes)
    of_label, every = _shares(c, classes)
    is_label = (labels.onto(dims) == Tensor((classes,), index).onto(dims)).astype(int)
    real = n.constant((index < c.program.valid(classes)).astype(int), (classes,))
    hot = n.product(labels.dims, n.constant(is_label, dims), of_label)
    return n.total(labels.dims, hot, n.product((), real, every))


MEANINGS = {
    "cross_entropy": Semantics(_whole),
    "max_logit": Semantics(lambda c: [Logits(c, c.args[0]).peak()]),
    "local_softmax_stats": Semantics(lambda c: [*Labelled(c, c.args[0], 2).parts(c.args[1])]),
    "token_loss": Semantics(lambda c: [_token_loss(c, "z_loss", *c.args)]),
    "logit_softmax_stats": Semantics(_own_parts),
    "rescale_to_global_max": Semantics(_rescale),
}
