"""What formulas are written in: the same ones are evaluated over a prime field and in float64.

Purpose: the arithmetic that op meanings may use, as a protocol.  Non-goals: the two that there are (`field`, `reals`).
"""

from typing import Protocol

from .tensors import Array, Dims, Tensor


class Numbers(Protocol):
    """An arithmetic on tensors of named dims.  Products and sums align dims by name and broadcast missing ones."""

    @property
    def seed(self) -> int:
        """What everything drawn at random depends on."""
        ...

    def random(self, shape: tuple[int, ...], name: str) -> Array:
        """Numbers that depend on seed and name only: [trials, *shape]."""
        ...

    def constant(self, value: Array, dims: Dims = ()) -> Tensor:
        """Integers, as numbers of this arithmetic: [1, *mesh axes, *dims]."""
        ...

    def ratio(self, above: int, below: int) -> Tensor:
        """A fraction."""
        ...

    def product(self, out: Dims, *factors: Tensor) -> Tensor:
        """The product of the factors, summed over all dims that `out` lacks."""
        ...

    def total(self, out: Dims, *terms: Tensor) -> Tensor:
        """The sum of the terms."""
        ...

    def negative(self, x: Tensor) -> Tensor:
        """-x"""
        ...

    def inverse(self, x: Tensor) -> Tensor:
        """1 / x"""
        ...

    def function(self, name: str, *operands: Tensor, constants: tuple[object, ...] = ()) -> Tensor:
        """The nonlinear elementwise function `name` of operands of the same dims, as `reals.FUNCTIONS` lists them."""
        ...

    def exponential(self, x: Tensor, less: Tensor | None = None) -> Tensor:
        """exp(x - less), so that exp(x - y) · exp(y - z) = exp(x - z)."""
        ...

    def softmax(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """exp(x) / Σ exp(x) over the last dim, of those elements for which `seen` is not zero; zero of the others."""
        ...

    def angles(self, positions: Array, pairs: int, theta: float, scaling: tuple[object, ...]) -> tuple[Tensor, Tensor]:
        """Cosine and sine of position · theta^(-i / pairs): positions [1, *mesh axes, n], results dims (seq, pair).

        scaling: its kind, factor, low, high, original, as `rope` takes them.
        """
        ...

    def rank(self, x: Tensor) -> Array:
        """Keys by which numbers are compared, [trials, *mesh axes, *dims]: the largest number has the largest key."""
        ...

    def unequal(self, x: Array, y: Array) -> Array:
        """Where two arrays of numbers differ."""
        ...
