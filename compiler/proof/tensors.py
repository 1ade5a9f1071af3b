"""Tensors with named dims, for every rank and every trial at once.

Purpose: one array holds what all ranks hold of a value, so that a program is evaluated once for all of them.
Non-goals: arithmetic (`field`, `reals`), what ranks are (`world`).
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

Array = NDArray[Any]
Dims = tuple[str, ...]


@frozen
class Degree:
    """A bound on the elements as polynomials in everything that is drawn at random, and in inverses of such.

    The largest degree of a term; and of these factors, how many at most are inverses.  Negative exponents, which
    exponentials have, count by their size.
    """

    all: int = 0
    inverses: int = 0

    def __add__(self, other: "Degree") -> "Degree":
        """That of products."""
        return Degree(self.all + other.all, self.inverses + other.inverses)

    def __or__(self, other: "Degree") -> "Degree":
        """That of sums."""
        return Degree(max(self.all, other.all), max(self.inverses, other.inverses))


NUMBER, RANDOM = Degree(), Degree(1)
"""The degrees of what is the same in all trials, and of what is drawn."""


class Tensor:
    """Local tensors of all ranks: `array` is [trials, *mesh axes, *dims]; an axis along which all is alike may be 1."""

    __slots__ = ("array", "degree", "dims")

    def __init__(self, dims: Dims, array: Array, degree: Degree = NUMBER) -> None:
        self.dims, self.array, self.degree = dims, array, degree

    @property
    def lead(self) -> int:
        """The number of the array's axes that stand before the dims."""
        return self.array.ndim - len(self.dims)

    def onto(self, dims: Dims) -> Array:
        """The array with its dims in the order of `dims`, and size 1 for those it lacks."""
        if self.dims == dims:
            return self.array
        order, index = _layout(self.dims, dims, self.lead)
        return self.array.transpose(order)[index]

    def at(self, index: int) -> "Tensor":
        """One slice along the first dim."""
        return Tensor(self.dims[1:], self.array[(slice(None),) * self.lead + (index,)], self.degree)


@cache
def _layout(own: Dims, dims: Dims, lead: int) -> tuple[tuple[int, ...], tuple[slice | None, ...]]:
    """The order of an array's axes, and the index that adds those of size 1."""
    assert set(own) <= set(dims), f"verify: {own} are not among {dims}"
    order = (*range(lead), *(lead + own.index(dim) for dim in dims if dim in own))
    return order, (*(slice(None),) * lead, *(slice(None) if dim in own else None for dim in dims))


def degree_of(tensors: Sequence[Tensor]) -> Degree:
    """The degree of sums of the tensors, and of whatever is put together of them."""
    found = Degree()
    for tensor in tensors:
        found |= tensor.degree
    return found


def stacked(dim: str, tensors: Sequence[Tensor]) -> Tensor:
    """The tensors along a new first dim."""
    arrays = np.broadcast_arrays(*(t.array for t in tensors))
    return Tensor((dim, *tensors[0].dims), np.stack(arrays, axis=tensors[0].lead), degree_of(tensors))


@cache
def subscripts(out: Dims, *operands: Dims) -> str:
    """The einsum of `operands` to `out`, over whatever leads."""
    letters = {dim: chr(ord("a") + i) for i, dim in enumerate(dict.fromkeys(sum(operands, ())))}
    words = ["..." + "".join(letters[dim] for dim in dims) for dims in (*operands, out)]
    return f"{','.join(words[:-1])}->{words[-1]}"
