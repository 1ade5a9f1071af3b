"""The semantics of the mutants' ops that are no ops of the IR.

Purpose: meanings that the audit's evaluation knows besides those of the ops.
Non-goals: the mistakes themselves, which say where these are used.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
from attrs import evolve, frozen

from ....compiler.ir import PARTIAL, Type
from ....compiler.ir.placements import ends
from ....compiler.proof.semantics import MEANINGS, Call, Semantics
from ....compiler.proof.sharded_state import stale
from ....compiler.proof.simulated_mesh import SimulatedMesh
from ....compiler.proof.tensors import Array, Tensor


def _kept(c: Call) -> list[Tensor]:
    return [c.args[0]]


def _one(c: Call) -> list[Tensor]:
    return [c.numbers.ratio(1, 1)]


def _ranks(c: Call) -> int:
    return prod(c.world.axes[axis] for axis in c.op.names("axes"))


def _divided(c: Call) -> list[Tensor]:
    """Divided by the size of a group, or of dims."""
    below = _ranks(c) * prod(c.world.dims[dim] for dim in c.op.names("dims"))
    return [c.numbers.product(c.dims, c.args[0], c.numbers.ratio(1, below))]


def _taken(c: Call, axis: str, ranks: Sequence[int]) -> Tensor:
    """Along an axis each rank holds what `ranks` says whose it is."""
    x, at = c.args[0], 1 + list(c.world.axes).index(axis)
    shape = [*x.array.shape]
    shape[at] = c.world.axes[axis]
    return Tensor(x.dims, np.broadcast_to(x.array, shape).take(ranks, axis=at), x.degree)


def _of_first(c: Call) -> list[Tensor]:
    """The value of the first rank of the group, on all of them."""
    for axis in c.op.names("axes"):
        c = evolve(c, args=[_taken(c, axis, [0] * c.world.axes[axis])])
    return [c.args[0]]


def _shifted(c: Call) -> list[Tensor]:
    (axis,) = c.op.names("axes")
    return [_taken(c, axis, np.roll(range(_ranks(c)), 1).tolist())]


def _exchanged(c: Call) -> list[Tensor]:
    (axis,) = c.op.names("axes")
    return [_taken(c, axis, [1, 0, *range(2, _ranks(c))])]


def _repeated(c: Call) -> list[Tensor]:
    """The rank's own part in place of everyone's."""
    x = c.args[0]
    at = x.dims.index(str(c.op.get("dim"))) - len(x.dims)
    return [Tensor(x.dims, np.concatenate([x.array] * _ranks(c), axis=at), x.degree)]


def _last(c: Call) -> list[Tensor]:
    """The last of values that are stacked."""
    return [c.args[0].get_slice(-1)]


def _flipped(c: Call) -> list[Tensor]:
    """A stack, last first."""
    x = c.args[0]
    return [Tensor(x.dims, np.flip(x.array, axis=x.lead), x.degree)]


def _alike(c: Call) -> list[Tensor]:
    """The first of values that are stacked, in the place of each."""
    x = c.args[0]
    return [Tensor(x.dims, x.array.take([0] * x.array.shape[x.lead], axis=x.lead), x.degree)]


def _behind(c: Call) -> list[Tensor]:
    """A stack, each value replaced by the one after it."""
    x = c.args[0]
    return [Tensor(x.dims, np.roll(x.array, -1, axis=x.lead), x.degree)]


def _marks(c: Call) -> list[Tensor]:
    """One at the first index along the result's dim, zero at the others."""
    first = np.arange(c.world.dims[c.dims[0]]) == 0
    return [Tensor(c.dims, first.astype(int).reshape(1, *(1,) * len(c.world.axes), -1))]


def _chosen(c: Call) -> list[Tensor]:
    """The last operand where the first says so, else the second."""
    mark, x, y = c.args
    return [Tensor(x.dims, np.where(mark.onto(x.dims) > 0, y.array, x.array), x.degree | y.degree)]


def _unseen(c: Call) -> list[Tensor]:
    """A gather's result in which each rank has its own part only; the rest is stale."""
    axes, (source, target) = c.op.names("axes"), ends(c.op)
    whole = c.world.coerce(c.args[0], axes, source, target, c.numbers)
    own = Tensor(c.args[0].dims, np.ones_like(c.args[0].array))
    return [stale(whole, c.world.coerce(own, axes, source, PARTIAL, c.numbers))]


def _counted_all(c: Call) -> list[Tensor]:
    labels = c.args[0]
    shape = labels.array.shape
    return [Tensor((), np.full(shape[: labels.lead], prod(shape[labels.lead :])))]


def _counted_first(c: Call) -> list[Tensor]:
    return MEANINGS["count_valid"].value(evolve(c, args=[c.args[0].get_slice(0)]))


@frozen(slots=False)
class _AllFirst(SimulatedMesh):
    """Ranks that each take their part of the dim `whole` for the first part."""

    whole: str = ""

    def indices(self, type: Type, dim: str) -> Array:
        found = super().indices(type, dim)
        return found[(slice(None), *[slice(1)] * len(self.axes))] if dim == self.whole else found


def _as_first(c: Call) -> list[Tensor]:
    """The op, on ranks that each take their part of a dim for the first."""
    kind, dim = str(c.op.get("op")), str(c.op.get("part of"))
    world = _AllFirst(c.world.axes, c.world.dims, c.world.zigzags, dim)
    return MEANINGS[kind].value(evolve(c, world=world, op=evolve(c.op, kind=kind)))


def _in_rank_order(c: Call) -> list[Tensor]:
    """The op, on ranks that hold one part each where they hold two chunks."""
    world, kind = evolve(c.world, zigzags=frozenset[tuple[str, str]]()), str(c.op.get("op"))
    if kind == "coerce":
        return [world.coerce(c.args[0], c.op.names("axes"), *ends(c.op), c.numbers)]
    return MEANINGS[kind].value(evolve(c, world=world, op=evolve(c.op, kind=kind)))


FAULTS = {
    "kept": Semantics(_kept),
    "one": Semantics(_one),
    "divided": Semantics(_divided),
    "of_first": Semantics(_of_first),
    "shifted": Semantics(_shifted),
    "exchanged": Semantics(_exchanged),
    "repeated": Semantics(_repeated),
    "last": Semantics(_last),
    "flipped": Semantics(_flipped),
    "alike": Semantics(_alike),
    "behind": Semantics(_behind),
    "marks": Semantics(_marks),
    "chosen": Semantics(_chosen),
    "unseen": Semantics(_unseen),
    "counted_all": Semantics(_counted_all),
    "counted_first": Semantics(_counted_first),
    "as_first": Semantics(_as_first),
    "in_rank_order": Semantics(_in_rank_order),
}
"""By the kind of an op in a mutant."""
