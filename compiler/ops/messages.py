"""The messages of an op, which each rank sends while it does the op.

Purpose: the entry of the op table that the account, link traffic, memory and the read-back take
communication from.  Non-goals: how often an op is done (`analysis.communication`), and stages of a
pipeline, which send by their schedule.
"""

from collections.abc import Callable
from typing import Literal

from attrs import frozen

from ..ir import Program, Type
from .saved_tensors import Local


@frozen
class Message:
    """A collective that an op begins each time it is done, as one rank sees it; or a run of them
    around a ring.

    op       all_reduce, all_gather, reduce_scatter, all_to_all; or rotate: every rank passes all
             of it on
    what     the name of the value that comes out, or that travels
    axes     the mesh axes of the group
    dtype    of the local tensor that goes in, as is its shape
    hops     how many calls there are, one after the other; 0 for one call.  Neighbours of as many
             hops alternate
    by       how many ranks further a rotate sends
    ragged   where ranks send more or less than the first size: whether it is an even share of `all`
             rows there are, or of the rows that there would be if `some` were not dropped; "" for
             equal sizes
    maximum  whether an all_reduce takes the maximum, not the sum
    among    the ranks of the axis that take part, if not all do
    """

    op: str
    what: str
    axes: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    hops: int = 0
    by: int = 1
    ragged: Literal["", "all", "some"] = ""
    maximum: bool = False
    among: tuple[int, ...] = ()


def pieces(program: Program, type: Type, dim: str, axes: tuple[str, ...]) -> tuple[int, ...]:
    """The shape that a value has in an exchange: a piece for each rank, cut along the dim that is
    then sharded.
    """
    shape, place = program.local_shape(type), program.place_of(type, dim)
    ranks = program.degree(axes)
    return (ranks, *shape[:place], shape[place] // ranks, *shape[place + 1 :])


Communicates = Callable[[Local], tuple[Message, ...]]
