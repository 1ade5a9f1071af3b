"""The same arithmetic in float64, with the functions themselves."""

from collections.abc import Callable, Sequence
from math import ceil, floor, log, pi
from typing import Any

import numpy as np
from attrs import frozen

from ..compiler.ops.pointwise import FUNCTIONS as POINTWISE
from ..compiler.ops.pointwise import Formula
from ..compiler.proof.tensors import Array, Back, Dims, Tensor, subscripts

TOLERANCE = 1e-9
"""How far apart two numbers may be, relative to their size, and count as equal."""


def _inverse_root(x: Array, eps: float) -> Array:
    return (x + eps) ** -0.5


def _inverse_root_slope(x: Array, eps: float) -> Array:
    return -0.5 * (x + eps) ** -1.5


def _clip(norm: Array, most: float) -> Array:
    return np.where((norm > most) & (most > 0), most / np.maximum(norm, 1e-300), 1.0)


def _slowed(
    frequency: Array,
    theta: float,
    kind: str,
    factor: float,
    low: float,
    high: float,
    original: float,
) -> Array:
    """Frequencies of rotary positions after scaling; llama3 as in its reference code, by
    wavelength, yarn by pair.
    """
    if kind == "none":
        return frequency
    if kind == "yarn":
        pairs = len(frequency)
        first, last = (
            pairs * log(original / (2 * pi * turns)) / log(theta) for turns in (high, low)
        )
        first, last = max(floor(first), 0), min(ceil(last), 2 * pairs - 1)
        slowed = np.clip((np.arange(pairs) - first) / max(last - first, 1e-3), 0, 1)
        return frequency * (1 - slowed) + frequency / factor * slowed
    share = (
        np.clip((original * frequency / (2 * pi) - low) / (high - low), 0, 1)
        if kind == "llama3"
        else 0.0
    )
    return frequency * (share + (1 - share) / factor)


def _kept(*given: Any) -> Array:
    """1 / (1 − share), or 0 for a `share` of all indices, by a hash of these and the site."""
    *indices, site, share = given
    word: Any = sum(np.sin((i + 1.5) * (index + site + 1)) for i, index in enumerate(indices))
    return np.where(np.modf(np.abs(word) * 1e4)[0] < share, 0.0, 1 / (1 - share))


def _opaque_slope(x: Array) -> Array:
    return 1 - np.tanh(x) ** 2


def _descended(param: Array, grad: Array, *settings: object) -> Array:
    return param - 0.5 * grad


def _elementwise(formula: Formula) -> Callable[..., Array]:
    def apply(x: Array, *constants: Any) -> Array:
        return np.vectorize(formula, otypes=[x.dtype])(x, *constants)

    return apply


def _balanced(bias: Array, load: Array, mean: Array, count: Array, rate: float) -> Array:
    return bias + rate * np.sign(mean - load)


def _ones(saved: Array, result: Array) -> Array:
    return np.ones(np.broadcast_shapes(saved.shape, result.shape))


def _if_below(count: Array, loss: Array, limit: Array) -> Array:
    return np.where(loss <= limit, count, 0.0)


def _no_limit(any_number: Array, deviations: object) -> Array:
    return np.full_like(any_number, np.inf)


FUNCTIONS: dict[str, Callable[..., Array]] = {
    **{entry.name: _elementwise(entry.value) for entry in POINTWISE},
    **{f"{entry.name} slope": _elementwise(entry.slope) for entry in POINTWISE},
    "inverse root": _inverse_root,
    "inverse root slope": _inverse_root_slope,
    "opaque": np.tanh,
    "opaque slope": _opaque_slope,
    "log": np.log,
    "reciprocal": np.reciprocal,
    "root": np.sqrt,
    "clip": _clip,
    "kept": _kept,
    "mismatch": _ones,
    "update": _descended,
    "balance": _balanced,
    "finite": np.abs,
    "limit": _no_limit,
    "below": _if_below,
}
"""Each nonlinear function of numbers and constants; the update is gradient descent."""


@frozen
class Reals:
    """Float64, in one trial, on a mesh of `axes` axes."""

    axes: int
    seed: int = 0
    trials: int = 1

    def random(self, shape: tuple[int, ...], name: str) -> Array:
        """Normal numbers that depend on seed and name only: [1, *shape]."""
        return np.random.default_rng([self.seed, *name.encode()]).standard_normal((1, *shape))

    def constant(self, value: Array, dims: Dims = ()) -> Tensor:
        return Tensor(dims, np.asarray(value, float))

    def ratio(self, above: int, below: int) -> Tensor:
        return Tensor((), np.full((1,) * (1 + self.axes), above / below))

    def product(self, out: Dims, *factors: Tensor) -> Tensor:
        path = subscripts(out, *(factor.dims for factor in factors))
        return Tensor(out, np.einsum(path, *(factor.array for factor in factors)))

    def total(self, out: Dims, *terms: Tensor) -> Tensor:
        array: Any = sum(term.onto(out) for term in terms)
        return Tensor(out, array)

    def negative(self, x: Tensor) -> Tensor:
        return Tensor(x.dims, -x.array)

    def inverse(self, x: Tensor) -> Tensor:
        return Tensor(x.dims, 1 / x.array)

    def function(self, name: str, *operands: Tensor, constants: tuple[object, ...] = ()) -> Tensor:
        return Tensor(operands[0].dims, FUNCTIONS[name](*(x.array for x in operands), *constants))

    def exponential(self, x: Tensor, less: Tensor | None = None) -> Tensor:
        return Tensor(x.dims, np.exp(x.array if less is None else x.array - less.onto(x.dims)))

    def softmax(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        scores = x.array if seen is None else np.where(seen.onto(x.dims) > 0, x.array, -np.inf)
        peak = scores.max(axis=-1, keepdims=True)
        # a row that sees nothing has no peak
        weights = np.exp(scores - np.where(peak == -np.inf, 0, peak))
        total = weights.sum(axis=-1, keepdims=True)
        return Tensor(x.dims, weights / np.where(total == 0, 1, total))

    def with_gradient(self, result: Tensor, operands: Sequence[Tensor], back: Back) -> Tensor:
        return result

    def angles(
        self, positions: Array, pairs: int, theta: float, scaling: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        angle = positions[..., None] * _slowed(
            theta ** (-np.arange(pairs) / pairs), theta, *scaling
        )
        return Tensor(("position", "pair"), np.cos(angle)), Tensor(
            ("position", "pair"), np.sin(angle)
        )

    def rank(self, x: Tensor) -> Array:
        return x.array

    def unequal(self, x: Array, y: Array) -> Array:
        scale = 1 + np.maximum(np.abs(x), np.abs(y))
        return ~(np.abs(x - y) <= TOLERANCE * scale)
