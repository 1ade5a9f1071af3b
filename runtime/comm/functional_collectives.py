"""Collectives as torch.compile sees them: ops of its graph instead of calls of a process group.

In a graph they keep the program's order, no op is done twice, and inductor may run other ops while
they are in flight.  Called only while a module is traced; elsewhere `collectives` calls the groups,
at half the host time.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .mesh import Axis

_ops: Any = cast(Any, torch.ops)._c10d_functional


def all_reduced(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """The sum, or with `max` the maximum, over the axis."""
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), op, axis.group.group_name))


def gathered(x: Tensor, axis: Axis) -> Tensor:
    """All ranks' x, concatenated along dim 0."""
    return _ops.wait_tensor(
        _ops.all_gather_into_tensor(x.contiguous(), axis.size, axis.group.group_name)
    )


def scattered(x: Tensor, axis: Axis) -> Tensor:
    """This rank's part of the sum, by dim 0."""
    return _ops.wait_tensor(
        _ops.reduce_scatter_tensor(x.contiguous(), "sum", axis.size, axis.group.group_name)
    )


def exchanged(pieces: Tensor, axis: Axis) -> Tensor:
    """Every rank's piece for this one, [ranks, …]: piece i of `pieces` goes to rank i."""
    split_sizes = [1] * axis.size
    return _ops.wait_tensor(
        _ops.all_to_all_single(pieces, split_sizes, split_sizes, axis.group.group_name)
    )


def distinct(x: Tensor) -> Tensor:
    """x as the forward of a `Function` may return it: while traced, a view that no other value of
    the forward is.

    Where a value is one tensor under two names, as behind a `to` or `contiguous` that has nothing
    to do, or behind an op in place, torch 2.11 gives the result's gradient to the other name, where
    it is lost.
    """
    if is_dynamo_compiling():
        return x.view_as(x)
    return x
