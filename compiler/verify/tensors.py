"""Tensors with named dims, for every rank and every trial at once.

Purpose: one array holds what all ranks hold of a value, so that a program is evaluated once for all of them.
Non-goals: arithmetic (`field`, `reals`), what ranks are (`world`).
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Dims = tuple[str, ...]


class Tensor:
    """Local tensors of all ranks: `array` is [trials, *mesh axes, *dims]; an axis along which all is alike may be 1.

    `degree` bounds the degree of the elements as polynomials in everything that is drawn at random; negative exponents,
    which exponentials have, count by their size.
    """

    __slots__ = ("array", "degree", "dims")

    def __init__(self, dims: Dims, array: Array, degree: int = 0) -> None:
        self.dims, self.array, self.degree = dims, array, degree

    @property
    def lead(self) -> int:
        """The number of the array's axes that stand before the dims."""
        return self.array.ndim - len(self.dims)

    def onto(self, dims: Dims) -> Array:
        """The array with its dims in the order of `dims`, and size 1 for those it lacks."""
        if self.dims == dims:
            return self.array
        order, missing = _layout(self.dims, dims, self.lead)
        return np.expand_dims(self.array.transpose(order), missing) if missing else self.array.transpose(order)

    def at(self, index: int) -> "Tensor":
        """One slice along the first dim."""
        return Tensor(self.dims[1:], self.array.take(index, axis=self.lead), self.degree)


@cache
def _layout(own: Dims, dims: Dims, lead: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    assert set(own) <= set(dims), f"verify: {own} are not among {dims}"
    order = (*range(lead), *(lead + own.index(dim) for dim in dims if dim in own))
    return order, tuple(lead + i for i, dim in enumerate(dims) if dim not in own)


def stacked(dim: str, tensors: Sequence[Tensor]) -> Tensor:
    """The tensors along a new first dim."""
    arrays = np.broadcast_arrays(*(t.array for t in tensors))
    return Tensor((dim, *tensors[0].dims), np.stack(arrays, axis=tensors[0].lead), max(t.degree for t in tensors))


@cache
def subscripts(out: Dims, *operands: Dims) -> str:
    """The einsum of `operands` to `out`, over whatever leads."""
    letters = {dim: chr(ord("a") + i) for i, dim in enumerate(dict.fromkeys(sum(operands, ())))}
    words = ["..." + "".join(letters[dim] for dim in dims) for dims in (*operands, out)]
    return f"{','.join(words[:-1])}->{words[-1]}"
