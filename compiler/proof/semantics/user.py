"""A function of the user's own: some function of each slice along the dims that it works along, the
same everywhere.

Each element of a slice's results is a nonlinear function of a random combination of all elements of
the slice: in the field a keyed hash, so that two steps agree only if they call it with the same
slices; and the product of such combinations of the operands that it is linear in.  Positions that
the function takes are operands without a gradient: a random number for each global position, so
that a rank that took others would have other results.
"""

from collections.abc import Iterable

import numpy as np

from ...ops.user import causal_dim, constants, linear_in, positions_in
from ..layout import rename_dims
from ..tensors import RANDOM, Array, Dims, Tensor
from .call import Call, Semantics


class _Slices:
    """The combinations of all operands, for one result."""

    def __init__(self, c: Call, result: int, dims: Dims) -> None:
        """`dims` are the dims of the result."""
        self.n, self.dims, self.op, self.result = c.numbers, dims, c.op, result
        self.along, self.linear = c.op.names("along"), linear_in(c.op)
        self.parts = list[Tensor]()
        for i, operand in enumerate((*c.args, *self._positions(c))):
            x = self._apart(operand)
            key = self._key(c, i, x)
            dims_of_part = self._among([*x.dims, *key.dims])
            self.parts.append(self.n.product(dims_of_part, x, key))
        bent, dims_of_bent = list[Tensor](), list[str]()
        for i, part in enumerate(self.parts):
            if i not in self.linear:
                bent.append(part)
                dims_of_bent += part.dims
        self.bent: Tensor | None = None
        if bent:
            self.bent = self.n.total(self._among(dims_of_bent), *bent)

    def _positions(self, c: Call) -> list[Tensor]:
        """The positions that the function takes: a random number for each global position."""
        numbers = list[Tensor]()
        for keyword, dim in positions_in(c.op):
            holder = next(i for i, type in enumerate(c.types) if dim in type.dims)
            of_positions = self.n.random((c.world.dims[dim],), f"{keyword}: positions along {dim}")
            numbers.append(Tensor((dim,), of_positions[:, c.indices(holder, dim)[0]], RANDOM))
        return numbers

    def _among(self, dims: Iterable[str]) -> Dims:
        """The dims among the result's, in its order."""
        names = set(dims)
        return tuple(dim for dim in self.dims if dim in names)

    def _apart(self, x: Tensor) -> Tensor:
        """The dims that stay inside a slice, apart from the result's of the same name."""
        dims = tuple(dim if dim in self.along else f"{dim}'" for dim in x.dims)
        return rename_dims(self.n, x, dims)

    def _key(self, c: Call, operand: int, x: Tensor) -> Tensor:
        """The factors that combine the elements of a slice: random numbers, whatever the order
        of dims.
        """
        inner = sorted(dim for dim in x.dims if dim.endswith("'"))
        dims = (*sorted(dim for dim in self.dims if dim not in self.along), *inner)
        shape = tuple(c.world.dims[dim.rstrip("'")] for dim in dims)
        name = f"{c.get('function')} {constants(c.op)} {self.result} {operand}"
        array = self.n.random(shape, name)
        causal = causal_dim(c.op)
        if causal and f"{causal}'" in inner:
            is_past = _is_past(dims.index(causal), dims.index(f"{causal}'"), shape)
            array = np.where(is_past, array, array.dtype.type(0))
        return Tensor(dims, array.reshape(len(array), *(1,) * len(c.world.axes), *shape), RANDOM)

    def value(self) -> Tensor:
        factors = [self.parts[i] for i in self.linear]
        if self.bent:
            factors.append(self.n.function("opaque", self.bent))
        return self.n.product(self.dims, *factors)


def _is_past(result: int, operand: int, shape: tuple[int, ...]) -> Array:
    """Where the position of an operand is not after the position of the result; both are dims of
    the shape, by index.
    """
    positions = np.indices(shape)
    return positions[operand] <= positions[result]


def _values(c: Call) -> list[Tensor]:
    return [_Slices(c, i, value.type.dims).value() for i, value in enumerate(c.op.outputs)]


MEANINGS = {"call": Semantics(_values)}
