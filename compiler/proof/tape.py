"""Gradients of whatever an arithmetic computes: a tape notes its operations and goes back along
them.

Purpose: one gradient rule for each operation of `Numbers`, so that the semantics of an op states
its value alone.  Non-goals: which operations an op is made of (`semantics`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from attrs import field, frozen

from .tensors import Array, Back, Dims, Numbers, Tensor

SLOPES: dict[str, Callable[[Numbers, Tensor, Tensor], Tensor]] = {
    "log": lambda n, x, y: n.inverse(x),
    "reciprocal": lambda n, x, y: n.negative(n.product(y.dims, y, y)),
}
"""The slopes that follow from operand and result; any other is a function of its own."""


@frozen
class _Entry:
    """An operation that was noted: `back` makes the gradient of an operand, given by its number,
    from the result's.
    """

    result: Tensor
    operands: Sequence[Tensor]
    back: Back


@frozen
class Tape:
    """An arithmetic that computes as `numbers` do, and notes what is made of its leaves.

    Tensors are told apart by identity.  The tape keeps the ones that it knows, so no other tensor
    can take the identity of one of them.
    """

    numbers: Numbers
    _entries: list[_Entry] = field(factory=list[_Entry], init=False)
    _known: dict[int, Tensor] = field(factory=dict[int, Tensor], init=False)

    def make_leaf(self, x: Tensor) -> Tensor:
        """The same numbers as a tensor of its own, whose gradients are wanted."""
        leaf = Tensor(x.dims, x.array, x.degree)
        self._known[id(leaf)] = leaf
        return leaf

    def knows(self, x: Tensor) -> bool:
        """Whether a tensor is a leaf, or was made of one."""
        return id(x) in self._known

    def gradients(
        self, grads_of_results: Iterable[tuple[Tensor, Tensor]], leaves: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """The gradients of some leaves, from pairs of a result and its gradient; None for a leaf
        on which no such result depends.
        """
        parts = defaultdict[int, list[Tensor]](list)
        for result, grad in grads_of_results:
            parts[id(result)].append(grad)
        wanted = self._made_of(leaves)
        for entry in reversed(self._entries):
            grad = self._sum(entry.result.dims, parts.pop(id(entry.result), []))
            if not grad:
                continue
            for i, operand in enumerate(entry.operands):
                if id(operand) in wanted:
                    parts[id(operand)].append(entry.back(grad, i))
        return [self._sum(leaf.dims, parts[id(leaf)]) for leaf in leaves]

    def _made_of(self, leaves: Sequence[Tensor]) -> set[int]:
        """The identities of some leaves, and of all that was made of them."""
        identities = {id(leaf) for leaf in leaves}
        for entry in self._entries:
            if any(id(operand) in identities for operand in entry.operands):
                identities.add(id(entry.result))
        return identities

    def _sum(self, dims: Dims, parts: Sequence[Tensor]) -> Tensor | None:
        if len(parts) <= 1:
            return parts[0] if parts else None
        return self.numbers.total(dims, *parts)

    # ---- operations without a gradient

    @property
    def seed(self) -> int:
        """The seed of the arithmetic."""
        return self.numbers.seed

    def random(self, shape: tuple[int, ...], name: str) -> Array:
        return self.numbers.random(shape, name)

    def constant(self, value: Array, dims: Dims = ()) -> Tensor:
        return self.numbers.constant(value, dims)

    def ratio(self, above: int, below: int) -> Tensor:
        return self.numbers.ratio(above, below)

    def angles(
        self, positions: Array, pairs: int, theta: float, scaling: tuple[object, ...]
    ) -> tuple[Tensor, Tensor]:
        return self.numbers.angles(positions, pairs, theta, scaling)

    def rank(self, x: Tensor) -> Array:
        return self.numbers.rank(x)

    def unequal(self, x: Array, y: Array) -> Array:
        return self.numbers.unequal(x, y)

    # ---- operations with a gradient

    def with_gradient(self, result: Tensor, operands: Sequence[Tensor], back: Back) -> Tensor:
        """The result, noted where it depends on a leaf."""
        if any(id(operand) in self._known for operand in operands):
            self._known[id(result)] = result
            self._entries.append(_Entry(result, operands, back))
        return result

    def product(self, out: Dims, *factors: Tensor) -> Tensor:
        def back(grad: Tensor, i: int) -> Tensor:
            return self._product_like(factors[i], grad, *factors[:i], *factors[i + 1 :])

        return self.with_gradient(self.numbers.product(out, *factors), factors, back)

    def _product_like(self, x: Tensor, *factors: Tensor) -> Tensor:
        """A product with the dims of `x`, and alike along dims that no factor has."""
        dims = {dim for factor in factors for dim in factor.dims}
        ones = list[Tensor]()
        for i, dim in enumerate(x.dims):
            if dim not in dims:
                size = x.array.shape[x.lead + i]
                ones.append(self.numbers.constant(np.ones((1,) * x.lead + (size,), int), (dim,)))
        return self.numbers.product(x.dims, *factors, *ones)

    def total(self, out: Dims, *terms: Tensor) -> Tensor:
        def back(grad: Tensor, i: int) -> Tensor:
            if terms[i].dims == out:
                return grad
            return self.numbers.product(terms[i].dims, grad)

        return self.with_gradient(self.numbers.total(out, *terms), terms, back)

    def negative(self, x: Tensor) -> Tensor:
        return self.with_gradient(
            self.numbers.negative(x), [x], lambda grad, i: self.numbers.negative(grad)
        )

    def inverse(self, x: Tensor) -> Tensor:
        y = self.numbers.inverse(x)

        def back(grad: Tensor, i: int) -> Tensor:
            return self.numbers.negative(self.numbers.product(x.dims, grad, y, y))

        return self.with_gradient(y, [x], back)

    def function(self, name: str, *operands: Tensor, constants: tuple[object, ...] = ()) -> Tensor:
        n, y = self.numbers, self.numbers.function(name, *operands, constants=constants)

        def back(grad: Tensor, i: int) -> Tensor:
            (x,) = operands
            if name in SLOPES:
                slope = SLOPES[name](n, x, y)
            else:
                slope = n.function(f"{name} slope", x, constants=constants)
            return n.product(x.dims, grad, slope)

        return self.with_gradient(y, operands, back)

    def exponential(self, x: Tensor, less: Tensor | None = None) -> Tensor:
        operands = [x] if less is None else [x, less]
        y = self.numbers.exponential(x, less)

        def back(grad: Tensor, i: int) -> Tensor:
            through = self.numbers.product(operands[i].dims, grad, y)
            return self.numbers.negative(through) if i else through

        return self.with_gradient(y, operands, back)

    def softmax(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        y = self.numbers.softmax(x, seen)

        def back(grad: Tensor, i: int) -> Tensor:
            return softmax_gradient(self.numbers, y, grad, x.dims[-1])

        return self.with_gradient(y, [x], back)


def softmax_gradient(n: Numbers, y: Tensor, grad: Tensor, over: str) -> Tensor:
    """y · (dy − Σ dy · y), the sum over the dim `over`."""
    rest = tuple(dim for dim in y.dims if dim != over)
    mean = n.negative(n.product(rest, grad, y))
    return n.product(y.dims, y, n.total(y.dims, grad, mean))
