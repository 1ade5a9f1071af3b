"""Tensors with named dims, for every rank and every trial at once, and the arithmetic of op
meanings as a protocol.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

Array = NDArray[Any]
Dims = tuple[str, ...]


@frozen
class Degree:
    """A bound on the elements as polynomials in everything that is drawn at random, and in inverses
    of such.

    The largest degree of a term; and how many of its factors at most are inverses.  Negative
    exponents, which exponentials have, count by their size.
    """

    all: int = 0
    inverses: int = 0

    def __add__(self, other: "Degree") -> "Degree":
        """The degree of products."""
        return Degree(self.all + other.all, self.inverses + other.inverses)

    def __or__(self, other: "Degree") -> "Degree":
        """The degree of sums."""
        if other.all <= self.all and other.inverses <= self.inverses:
            return self
        return Degree(max(self.all, other.all), max(self.inverses, other.inverses))


NUMBER, RANDOM = Degree(), Degree(1)
"""The degrees of what is the same in all trials, and of what is drawn."""


class Tensor:
    """Local tensors of all ranks: `array` is [trials, *mesh axes, *dims]; an axis along which
    all is alike may be 1.
    """

    __slots__ = ("array", "degree", "dims")

    def __init__(self, dims: Dims, array: Array, degree: Degree = NUMBER) -> None:
        self.dims, self.array, self.degree = dims, array, degree

    @property
    def lead(self) -> int:
        """The number of the array's axes before the dims."""
        return self.array.ndim - len(self.dims)

    def onto(self, dims: Dims) -> Array:
        """The array with its dims in the order of `dims`, and size 1 for dims that it lacks."""
        if self.dims == dims:
            return self.array
        order, index = _layout(self.dims, dims, self.lead)
        return self.array.transpose(order)[index]

    def get_slice(self, index: int) -> "Tensor":
        """One slice along the first dim."""
        return Tensor(self.dims[1:], self.array[(slice(None),) * self.lead + (index,)], self.degree)


@cache
def _layout(
    array_dims: Dims, dims: Dims, lead: int
) -> tuple[tuple[int, ...], tuple[slice | None, ...]]:
    """The order of an array's axes, and the index that adds axes of size 1."""
    assert set(array_dims) <= set(dims), f"verify: {array_dims} are not among {dims}"
    order = (*range(lead), *(lead + array_dims.index(dim) for dim in dims if dim in array_dims))
    index: list[slice | None] = [slice(None)] * lead
    for dim in dims:
        index.append(slice(None) if dim in array_dims else None)
    return order, tuple(index)


def degree_of(tensors: Sequence[Tensor]) -> Degree:
    """The degree of sums of the tensors, and of whatever is put together of them."""
    degree = Degree()
    for tensor in tensors:
        degree |= tensor.degree
    return degree


def stack_tensors(dim: str, tensors: Sequence[Tensor]) -> Tensor:
    """The tensors along a new first dim."""
    arrays = np.broadcast_arrays(*(t.array for t in tensors))
    return Tensor(
        (dim, *tensors[0].dims), np.stack(arrays, axis=tensors[0].lead), degree_of(tensors)
    )


@cache
def subscripts(out: Dims, *operands: Dims) -> str:
    """The einsum of `operands` to `out`, over whatever leads."""
    letters = {dim: chr(ord("a") + i) for i, dim in enumerate(dict.fromkeys(sum(operands, ())))}
    words = list[str]()
    for dims in (*operands, out):
        words.append("..." + "".join(letters[dim] for dim in dims))
    return f"{','.join(words[:-1])}->{words[-1]}"


Back = Callable[[Tensor, int], Tensor]
"""Makes the gradient of an operand, given by its number, from the gradient of the result."""


class Numbers(Protocol):
    """An arithmetic on tensors of named dims.

    Products and sums align dims by name and broadcast missing ones.
    """

    @property
    def seed(self) -> int:
        """The seed of all random values."""
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
        """The nonlinear elementwise function `name` of operands of the same dims, as
        `reals.FUNCTIONS` lists them.
        """
        ...

    def exponential(self, x: Tensor, less: Tensor | None = None) -> Tensor:
        """exp(x - less), so that exp(x - y) · exp(y - z) = exp(x - z)."""
        ...

    def softmax(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """exp(x) / Σ exp(x) over the last dim, of elements for which `seen` is not zero; zero of
        the others.
        """
        ...

    def with_gradient(self, result: Tensor, operands: Sequence[Tensor], back: Back) -> Tensor:
        """The result, whose elements are elements of the operands at other places: in other dims,
        at other positions or on other ranks.  A gradient goes `back` to where they came from.
        """
        ...

    def angles(
        self, positions: Array, pairs: int, theta: float, scaling: tuple[object, ...]
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine of position · theta^(-i / pairs): positions [1, *mesh axes, n], results
        (position, pair).

        scaling: its kind, factor, low, high, original, as `rope` takes them.
        """
        ...

    def rank(self, x: Tensor) -> Array:
        """Keys for comparing numbers, [trials, *mesh axes, *dims]: the largest number
        has the largest key.
        """
        ...

    def unequal(self, x: Array, y: Array) -> Array:
        """Where two arrays of numbers differ."""
        ...
