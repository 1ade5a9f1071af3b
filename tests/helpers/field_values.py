"""Global values in the field, and what the ranks of a mesh hold of them: the verifier's own ranks,
sums spread.

Purpose: values to evaluate ops and coercions on.  Non-goals: ops (`test_op_rules`), what a coercion
does (`tests/proof/test_simulated_mesh.py`).
"""

import numpy as np

from scalec.compiler.ir import INVARIANT, MAXIMUM, PARTIAL, Kind, Type
from scalec.compiler.proof.inputs import everywhere
from scalec.compiler.proof.interpreter import differing
from scalec.compiler.proof.prime_field import Field
from scalec.compiler.proof.simulated_mesh import SimulatedMesh
from scalec.compiler.proof.tensors import RANDOM, Dims, Tensor

TRIALS = 2

DISTINCT = (Kind.SHARDED, Kind.PARTIAL)
"""On axes with these, ranks hold what others do not."""


def drawn(world: SimulatedMesh, dims: Dims, name: str) -> Tensor:
    """A global value of random numbers that depend on `name`, the same for every mesh."""
    numbers = Field(TRIALS, len(world.axes)).random(tuple(world.dims[dim] for dim in dims), name)
    return everywhere(Tensor(dims, numbers, RANDOM), world)


def spread(world: SimulatedMesh, numbers: Field, whole: Tensor, type: Type, name: str) -> Tensor:
    """Each rank's part of a global value placed as `type`; a sum is spread over its ranks, at
    random by `name`.
    """
    held = world.spread(whole, type)
    for axis in (axis for axis in world.axes if type.placement_on(axis) == PARTIAL):
        held = numbers.total(type.dims, held, _noise(world, numbers, type, axis, name))
    return held


def _noise(world: SimulatedMesh, numbers: Field, type: Type, axis: str, name: str) -> Tensor:
    """Random parts that add up to zero along an axis; copies of one part are alike."""
    ranks = (
        size if type.placement_on(each).kind in DISTINCT else 1 for each, size in world.axes.items()
    )
    parts = numbers.random((*ranks, *world.shape(type)), f"{name} along {axis}")
    at = 1 + list(world.axes).index(axis)
    before = np.roll(parts, 1, axis=at)
    return numbers.total(
        type.dims, Tensor(type.dims, parts), numbers.negative(Tensor(type.dims, before))
    )


def is_spread(
    world: SimulatedMesh, numbers: Field, held: Tensor, type: Type, whole: Tensor
) -> bool:
    """Whether ranks hold a global value as `type` says: local shapes, and the value that all
    can make of it.
    """
    if held.dims != type.dims or held.array.shape[held.lead :] != world.shape(type):
        return False
    for axis in reversed(world.axes):  # inner shards first
        place = type.placement_on(axis)
        if place.kind in DISTINCT or place == MAXIMUM:
            held = world.coerce(held, (axis,), place, INVARIANT, numbers)
    return not differing(numbers, held, Tensor(type.dims, whole.onto(type.dims)))
