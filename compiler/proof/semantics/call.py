"""The arguments of an op's semantics: the op with its operands on all ranks."""

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
from attrs import frozen

from ...ir import Attr, Bucket, Op, Placement, Program, Type
from ...ir.placements import conjugate
from ...ops import OPS
from ..sharded_state import pad_shard, parts
from ..simulated_mesh import SimulatedMesh
from ..tensors import Array, Dims, Numbers, Tensor


@frozen
class Call:
    """An op, its operands and their types, and the arithmetic and the ranks it is evaluated in."""

    program: Program
    world: SimulatedMesh
    numbers: Numbers
    op: Op
    args: Sequence[Tensor]
    types: Sequence[Type]

    @property
    def dims(self) -> Dims:
        """The dims of the first result."""
        return self.op.outputs[0].type.dims

    def get(self, key: str) -> Attr:
        """The attribute `key`, given or by default."""
        return OPS[self.op.kind].get(self.op, key)

    def number(self, key: str) -> float:
        """The attribute `key`, a number."""
        value = self.get(key)
        assert isinstance(value, int | float), f"verify: {self.op.kind}: {key} is no number"
        return float(value)

    def ratio(self, key: str) -> Tensor:
        """The attribute `key`, exactly."""
        return self.numbers.ratio(*self.number(key).as_integer_ratio())

    @property
    def bucket(self) -> Bucket | None:
        """The bucket that the op names, if any."""
        name = dict(self.op.attrs).get("bucket")
        if not name:
            return None
        return self.program.bucket(str(name))

    @cached_property
    def update_gradients(self) -> list[Tensor]:
        """The gradients of an update, one for each of its parameters; zero for what the rank
        does not update.
        """
        grad, bucket = self.args[0], self.bucket
        if not bucket:
            return [grad]
        whole = pad_shard(self.program, self.world, bucket, grad, self.numbers)
        return parts(self.program, self.world, bucket, whole)

    def zero(self, type: Type) -> Tensor:
        """Zeros, alike on all ranks."""
        shape = (1, *(1,) * len(self.world.axes), *self.world.shape(type))
        return self.numbers.constant(np.zeros(shape, int), type.dims)

    def coerce(
        self, x: Tensor, axes: Sequence[str], source: Placement, target: Placement
    ) -> Tensor:
        """Each rank's value after a coercion, whose gradient is the conjugate coercion's."""
        n, back = self.numbers, conjugate(source, target)
        return n.with_gradient(
            self.world.coerce(x, axes, source, target, n),
            [x],
            lambda grad, i: self.world.coerce(grad, axes, *back, n),
        )

    def indices(self, operand: int, dim: str) -> Array:
        """The global indices along `dim` of what each rank holds of an operand: [1, *mesh axes,
        n].
        """
        return self.world.indices(self.types[operand], dim)

    def hot(self, ids: int, operand: int, dim: str) -> Tensor:
        """One where the index along `dim` of an operand is the id, else zero: the dims of the
        ids, then `dim`.
        """
        labels = self.args[ids]
        dims = (*labels.dims, dim)
        index = Tensor((dim,), self.indices(operand, dim))
        return self.numbers.constant((labels.onto(dims) == index.onto(dims)).astype(int), dims)


Value = Callable[[Call], list[Tensor]]
FromResult = Callable[[Call, Tensor, Tensor], Tensor]


@frozen
class Semantics:
    """The results of an op; gradients follow from it by a tape (`vjp`).

    from_result  of an op whose `vjp` reads the result in place of the operand: the operand's
                 gradient, from the result's gradient and the result
    """

    value: Value
    from_result: FromResult | None = None
