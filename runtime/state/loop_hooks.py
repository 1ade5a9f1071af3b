"""What moves around a turn of a repeat: its weights come and go, its gradients are reduced, while the model computes.

Autograd functions that leave a value as it is, and act when forward and backward come by: backward enters a turn where
forward has left it, and autograd runs what was made last first.  So `reshard` comes before all of a turn's
backward, `unshard` and `reduce_grads_in_backward` after all of it (FSDP, arXiv:2304.11277).  What is done, and in which
order, follows from the program alone, and so is the same on all ranks.

Non-goals: buckets without turns, which the step moves in sight (`collectives`); stages of a pipeline (`chunks`).
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from ..comm.mesh import Axis, End
from .flat_param import FlatParam
from .unsharded import Working

FlatParams = Mapping[str, Any]
"""The turns of each bucket that has them, for these functions: a list, or lists in a list where repeats are nested.

Of a pipeline, the chunks of each bucket: a list.
"""

NOTHING: FlatParams = {}


def reduce_grads_in_backward(
    x: Tensor,
    own: FlatParam,
    *,
    scatter: Axis | None = None,
    add: Axis | None = None,
    each: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x; backward begins to sum the turn's gradient: for each rank of `scatter` its part, and then that over `add`.

    It does so after the last microbatch, or after `each`, whose sum is added to those before.  With `dtype`, what is
    sent and summed is the gradient as that.
    """
    assert each == own.gradient.by_parts, "flows: gradients are kept whole up to the last microbatch, or not at all"
    return _apply(_ReduceGrads, x, own, scatter, add, dtype)


def unshard(x: Tensor, own: FlatParam, axis: Axis) -> Tensor:
    """x, with the turn's weights gathered, and the next turns' on their way; backward frees them."""
    return x if axis.size == 1 else _apply(_Unshard, x, own.working, axis)


def reshard(x: Tensor, own: FlatParam, axis: Axis) -> Tensor:
    """x, with the turn's weights freed; backward gathers them again, and those of the turns before."""
    return x if axis.size == 1 else _apply(_Reshard, x, own.working, axis)


def wait_for_unshard(x: Tensor, own: FlatParam) -> Tensor:
    """x, with the turn's weights there, if `unshard_ahead` began to gather them."""
    own.working.arrive()
    return x


def unshard_ahead(axis: Axis, *flat_params: list[Any]) -> None:
    """Begins to gather the weights of every turn of buckets, turn by turn, each for its `wait_for_unshard`.

    Those of a pipeline's chunks, stage by stage, each for the first forward of its stage.
    """
    if axis.size == 1:
        return
    line = line_of(axis)
    for own in sorted((own for each in flat_params for own in in_order(each)), key=lambda own: own.place):
        own.working.begin(axis, line, "result")


def in_order(flat_params: Iterable[Any]) -> Iterator[FlatParam]:
    """The buffers of a bucket, however nested."""
    for each in flat_params:
        if isinstance(each, FlatParam):
            yield each
        else:
            yield from in_order(each)


class _ReduceGrads(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, own: FlatParam, scatter: Axis | None, add: Axis | None, dtype: torch.dtype | None
    ) -> Tensor:
        ctx.of, ctx.how = own.gradient, (scatter, add, dtype)
        ctx.line = line_of(add)
        return x

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        ctx.of.left -= 1
        if ctx.of.by_parts or ctx.of.left == 0:
            ctx.of.reductions.begin(ctx.of, *ctx.how, ctx.line)
        return *grad_outputs, None, None, None, None


class _Unshard(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, own: Working, axis: Axis) -> Tensor:
        ctx.own = own
        _gathered(own, axis, line_of(axis), "result")
        return x

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        ctx.own.free()
        return *grad_outputs, None, None


class _Reshard(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, own: Working, axis: Axis) -> Tensor:
        ctx.own, ctx.axis, ctx.line = own, axis, line_of(axis)
        own.free()
        return x

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        _gathered(ctx.own, ctx.axis, ctx.line, "result again")
        return *grad_outputs, None, None


def _gathered(own: Working, axis: Axis, line: Any, end: End) -> None:
    """Begins what is to be under way and is not, then waits for a turn's weights."""
    for each in own.upcoming(backwards=end == "result again"):
        if each.is_freed:
            each.begin(axis, line, end)
    own.arrive()


def _apply(function: type[Function], x: Tensor, *args: Any) -> Tensor:
    parent: Any = super(Function, function)  # past `Function.apply`, whose frame is not the program's
    return cast(Tensor, parent.apply(x, *args))


def line_of(axis: Axis | None) -> Any:
    """The line of the program, in a sanitized run."""
    return axis.watch.here() if axis is not None and axis.watch is not None else None
