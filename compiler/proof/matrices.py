"""Two tensors as stacks of matrices: numpy multiplies these several times as fast as einsum
multiplies the tensors.

Purpose: which dims are rows, columns and the sum between them.  Non-goals: the arithmetic
(`prime_field`).
"""

from functools import cache
from math import prod

import numpy as np
from attrs import frozen

from .tensors import Array, Dims, Tensor


@frozen
class Matrices:
    """A product of two tensors, as matrices along the last two axes.

    left   [whatever leads, shared dims, rows, summed]
    right  [whatever leads, shared dims, summed, columns]
    sizes  of the dims that are rows, then of the dims that are columns
    order  of the result's axes, among what leads, shared dims, rows and columns
    """

    left: Array
    right: Array
    sizes: tuple[int, ...]
    order: tuple[int, ...]

    def tensor(self, product: Array) -> Array:
        """The product of the matrices with the result's dims as axes."""
        return product.reshape(*product.shape[:-2], *self.sizes).transpose(self.order)


def matrices(out: Dims, x: Tensor, y: Tensor) -> Matrices:
    """The matrices whose product has the dims `out`; what one tensor alone has must be among
    them.
    """
    lead = x.lead
    assert lead == y.lead, f"verify: {lead} axes and {y.lead} lead"
    left, right, order, (shared, rows, columns) = _orders(out, x.dims, y.dims, lead)
    x_array, y_array = x.array.transpose(left), y.array.transpose(right)
    first = lead + shared
    row_sizes, x_summed = x_array.shape[first : first + rows], x_array.shape[first + rows :]
    cut = y_array.ndim - columns
    y_summed, column_sizes = y_array.shape[first:cut], y_array.shape[cut:]
    if x_summed != y_summed:  # where one is 1, the other
        summed = np.broadcast_shapes(x_summed, y_summed)
        x_array = np.broadcast_to(x_array, (*x_array.shape[: first + rows], *summed))
        y_array = np.broadcast_to(y_array, (*y_array.shape[:first], *summed, *column_sizes))
        x_summed = summed
    count = prod(x_summed)
    return Matrices(
        x_array.reshape(*x_array.shape[:first], prod(row_sizes), count),
        y_array.reshape(*y_array.shape[:first], count, prod(column_sizes)),
        (*row_sizes, *column_sizes),
        order,
    )


Order = tuple[int, ...]


@cache
def _orders(
    out: Dims, x: Dims, y: Dims, lead: int
) -> tuple[Order, Order, Order, tuple[int, int, int]]:
    """The orders of both arrays' axes and of the result's; how many dims are shared, rows and
    columns.
    """
    assert {*x} ^ {*y} <= {*out}, (
        f"verify: {x} and {y} are summed one by one before they make {out}"
    )
    shared = [dim for dim in out if dim in x and dim in y]
    rows = [dim for dim in out if dim in x and dim not in y]
    columns = [dim for dim in out if dim in y and dim not in x]
    summed = [dim for dim in x if dim in y and dim not in out]
    leading, product = range(lead), [*shared, *rows, *columns]
    left = (*leading, *(lead + x.index(dim) for dim in (*shared, *rows, *summed)))
    right = (*leading, *(lead + y.index(dim) for dim in (*shared, *summed, *columns)))
    result = (*leading, *(lead + product.index(dim) for dim in out))
    return left, right, result, (len(shared), len(rows), len(columns))
