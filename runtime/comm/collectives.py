"""Coercions between placements: each is a collective (or none) forward and its conjugate backward.

I invariant, R replicated, S(dim) sharded, P partial.  The backward of `a → b` is `dual(b) →
dual(a)`, where dual(I) = I, dual(R) = P, dual(S) = S, dual(P) = R.  (`replicate` and `all_reduce`
are f and g of Megatron-LM, arXiv:1909.08053, section 3.)  On an axis of size 1 every coercion is
the identity.

A `zigzag` dim is sharded by an axis of n ranks in 2n pieces: rank r holds pieces r and 2n − 1 − r.
A whole dim is in the order of its positions all the same.

In a sanitized run the axes have a watch, which sees the operand and the result of each coercion
(`debug.sanitize`).
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_dynamo_compiling

from ..autograd.recompute import Call
from . import c10d, functional_collectives
from .mesh import Axis, End
from .positions import chunks, from_ranks, to_ranks

# Shapes are lists: these functions are called once a layer and more.  For the same reason they ask
# `is_dynamo_compiling`, which is one call where `is_compiling` is two: dynamo alone traces graphs.

_NO_GRADIENTS = (None,) * 4  # of the dims, and of whether they are zigzag
_DUAL = {"I": "I", "R": "P", "S": "S", "P": "R"}  # the placement of a gradient
_SAME = "IR"


def _same(x: Tensor, axis: Axis) -> Tensor:
    return x


def _reduce(x: Tensor, axis: Axis) -> Tensor:
    if is_dynamo_compiling():
        return functional_collectives.all_reduced(x, axis)
    out = x.clone(memory_format=torch.contiguous_format)
    c10d.all_reduce(out, axis.group)
    return out


def _maximum(x: Tensor, axis: Axis) -> Tensor:
    if is_dynamo_compiling():
        return functional_collectives.all_reduced(x, axis, "max")
    out = x.clone(memory_format=torch.contiguous_format)
    c10d.maximum(out, axis.group)
    axis.show_to_watch(out, "result")
    return out


def gather(x: Tensor, axis: Axis, dim: int, zigzag: bool) -> Tensor:
    """Every rank's part along a dim, outside autograd."""
    if dim != 0:
        return gather(x.movedim(dim, 0), axis, 0, zigzag).movedim(0, dim).contiguous()
    if zigzag:
        return _reorder_pieces(gather(x, axis, 0, False), 0, from_ranks(axis.size))
    if is_dynamo_compiling():
        return functional_collectives.gathered(x, axis)
    shape = list(x.shape)
    shape[0] *= axis.size
    out = x.new_empty(shape)
    c10d.all_gather(out, x.contiguous(), axis.group)
    return out


def _reorder_pieces(x: Tensor, dim: int, order: tuple[int, ...]) -> Tensor:
    """A copy with the pieces of a zigzag in this order."""
    pieces = x.chunk(len(order), dim)
    return torch.cat([pieces[piece] for piece in order], dim)


def _scatter(x: Tensor, axis: Axis, dim: int, zigzag: bool) -> Tensor:
    if dim != 0:
        return _scatter(x.movedim(dim, 0), axis, 0, zigzag).movedim(0, dim).contiguous()
    if zigzag:
        x = _reorder_pieces(x, 0, to_ranks(axis.size))
    if is_dynamo_compiling():
        return functional_collectives.scattered(x, axis)
    shape = list(x.shape)
    shape[0] //= axis.size
    out = x.new_empty(shape)
    c10d.reduce_scatter(out, x.contiguous(), axis.group)
    return out


def _exchange(
    x: Tensor, axis: Axis, dim_from: int, dim_to: int, zigzag_from: bool, zigzag_to: bool
) -> Tensor:
    if zigzag_to:
        x = _reorder_pieces(x, dim_to, to_ranks(axis.size))
    pieces: Tensor = cast(Any, x).unflatten(dim_to, (axis.size, -1)).movedim(dim_to, 0).contiguous()
    if is_dynamo_compiling():
        out = functional_collectives.exchanged(pieces, axis)
    else:
        out = torch.empty_like(pieces)
        c10d.all_to_all(out, pieces, axis.group)
    out = out.movedim(0, dim_from).flatten(dim_from, dim_from + 1)
    if zigzag_from:
        out = _reorder_pieces(out, dim_from, from_ranks(axis.size))
    return out


def _exchange_back(
    x: Tensor, axis: Axis, dim_from: int, dim_to: int, zigzag_from: bool, zigzag_to: bool
) -> Tensor:
    return _exchange(x, axis, dim_to, dim_from, zigzag_to, zigzag_from)


def _runs(size: int, axis: Axis) -> tuple[tuple[int, int], ...]:
    """(start, length) of this rank's parts of a zigzag dim of `size`."""
    return chunks(size, ((axis.size, axis.rank, True),))


def _slice(x: Tensor, axis: Axis, dim: int, zigzag: bool) -> Tensor:
    if zigzag:
        return torch.cat(
            [x.narrow(dim, *run) for run in _runs(x.shape[dim], axis)], dim
        ).contiguous()
    size = x.shape[dim] // axis.size
    # A copy: a view that autograd saves would keep the whole of x alive.
    return x.narrow(dim, axis.rank * size, size).clone(memory_format=torch.contiguous_format)


def _pad(x: Tensor, axis: Axis, dim: int, zigzag: bool) -> Tensor:
    size = x.shape[dim]
    shape = list(x.shape)
    shape[dim] = size * axis.size
    padded = x.new_zeros(shape)
    if not zigzag:
        padded.narrow(dim, axis.rank * size, size).copy_(x)
        return padded
    offset = 0
    for start, length in _runs(shape[dim], axis):
        padded.narrow(dim, start, length).copy_(x.narrow(dim, offset, length))
        offset += length
    return padded


def _first(x: Tensor, axis: Axis) -> Tensor:
    if axis.rank == 0:
        return x
    return torch.zeros_like(x)


def _convert_with_watch(
    convert: Callable[..., Tensor],
    *ends: tuple[str, End],
    x: Tensor,
    axis: Axis,
    dims: tuple[int, ...],
    line: Any,
) -> Tensor:
    """`convert` between two `ends` and their placements; the axis' watch sees what should be
    the same on all ranks.
    """
    (source, before), (target, after) = ends
    if source in _SAME:
        axis.show_to_watch(x, before, line)
    y = convert(x, axis, *dims)
    if target in _SAME and (y is not x or source not in _SAME):
        axis.show_to_watch(y, after, line)
    return y


def _conjugate(
    name: str, ends: str, forward: Callable[..., Tensor], backward: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """A coercion between two placements that runs `forward` on a value and `backward` on its
    gradient.

    `name` shows in profiles.
    """
    source, target = ends
    ahead = partial(_convert_with_watch, forward, (source, "operand"), (target, "result"))
    back = partial(
        _convert_with_watch,
        backward,
        (_DUAL[target], "result gradient"),
        (_DUAL[source], "operand gradient"),
    )

    def run(ctx: Any, x: Tensor, axis: Axis, *dims: int) -> Tensor:
        ctx.axis, ctx.dims = axis, dims
        if axis.watch is None:
            return functional_collectives.distinct(forward(x, axis, *dims))
        ctx.line = axis.watch.here()
        return ahead(x=x, axis=axis, dims=dims, line=ctx.line)

    def run_back(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        axis, dims = ctx.axis, ctx.dims
        if axis.watch is None:
            return (backward(gradient, axis, *dims), None, *_NO_GRADIENTS[: len(dims)])
        operand_gradient = back(x=gradient, axis=axis, dims=dims, line=ctx.line)
        return (operand_gradient, None, *_NO_GRADIENTS[: len(dims)])

    function: Any = type(
        name, (Function,), {"forward": staticmethod(run), "backward": staticmethod(run_back)}
    )
    # Past `Function.apply`, a wrapper in Python that serves functorch transforms alone: a
    # microsecond and more a call.
    parent: Any = super(Function, function)

    def coerced(*operands: Any) -> Tensor:
        if is_dynamo_compiling():
            return function.apply(*operands)  # torch 2.11 does not trace the parent's
        return parent.apply(*operands)

    return coerced


_replicate = _conjugate("Replicate", "IR", _same, _reduce)
_all_reduce_sum = _conjugate("AllReduce", "PI", _reduce, _same)
_all_gather_scatter = _conjugate("AllGather", "SR", gather, _scatter)
_reduce_scatter_gather = _conjugate("ReduceScatter", "PS", _scatter, gather)
_all_gather_slice = _conjugate("AllGatherInvariant", "SI", gather, _slice)
_shard = _conjugate("Shard", "IS", _slice, gather)
_take_shard = _conjugate("TakeShard", "RS", _slice, _pad)
_pad_shard = _conjugate("PadShard", "SP", _pad, _slice)
_swap_shards = _conjugate("AllToAll", "SS", _exchange, _exchange_back)
_once = _conjugate("Once", "IP", _first, _same)
_invariant = _conjugate("Invariant", "RI", _same, _first)
_once_replicated = _conjugate("OnceReplicated", "RP", _first, _first)


def replicate(x: Tensor, axis: Axis) -> Tensor:
    """I → R: nothing forward, all-reduce backward."""
    if axis.size == 1:
        return x
    return _replicate(x, axis)


def all_reduce(x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Tensor:
    """P → I: all-reduce forward, nothing backward; with `max`, max-partial → I, which has no
    gradient.
    """
    if op == "max":
        x = x.detach()
    if axis.size == 1:
        return x
    if op == "max":
        return _maximum(x, axis)
    return _all_reduce_sum(x, axis)


def all_gather(x: Tensor, axis: Axis, dim: int, zigzag: bool = False) -> Tensor:
    """S(dim) → R: all-gather forward, reduce-scatter backward."""
    if axis.size == 1:
        return x
    return _all_gather_scatter(x, axis, dim, zigzag)


def reduce_scatter(x: Tensor, axis: Axis, dim: int, zigzag: bool = False) -> Tensor:
    """P → S(dim): reduce-scatter forward, all-gather backward."""
    if axis.size == 1:
        return x
    return _reduce_scatter_gather(x, axis, dim, zigzag)


def all_gather_invariant(x: Tensor, axis: Axis, dim: int, zigzag: bool = False) -> Tensor:
    """S(dim) → I: all-gather forward, this rank's slice backward."""
    if axis.size == 1:
        return x
    return _all_gather_slice(x, axis, dim, zigzag)


def shard(x: Tensor, axis: Axis, dim: int, zigzag: bool = False) -> Tensor:
    """I → S(dim): this rank's slice forward, all-gather backward."""
    if axis.size == 1:
        return x
    return _shard(x, axis, dim, zigzag)


def take_shard(x: Tensor, axis: Axis, dim: int, zigzag: bool = False) -> Tensor:
    """R → S(dim): this rank's slice forward, padding with zeros backward."""
    if axis.size == 1:
        return x
    return _take_shard(x, axis, dim, zigzag)


def pad_shard(x: Tensor, axis: Axis, dim: int, zigzag: bool = False) -> Tensor:
    """S(dim) → P: padding with zeros forward, this rank's slice backward."""
    if axis.size == 1:
        return x
    return _pad_shard(x, axis, dim, zigzag)


def all_to_all(
    x: Tensor,
    axis: Axis,
    dim_from: int,
    dim_to: int,
    zigzag_from: bool = False,
    zigzag_to: bool = False,
) -> Tensor:
    """S(dim_from) → S(dim_to): all-to-all, and the reverse backward."""
    if axis.size == 1:
        return x
    return _swap_shards(x, axis, dim_from, dim_to, zigzag_from, zigzag_to)


def once(x: Tensor, axis: Axis) -> Tensor:
    """I → P: zero but on rank 0 forward, nothing backward."""
    if axis.size == 1:
        return x
    return _once(x, axis)


def invariant(x: Tensor, axis: Axis) -> Tensor:
    """R → I: nothing forward, zero but on rank 0 backward."""
    if axis.size == 1:
        return x
    return _invariant(x, axis)


def once_replicated(x: Tensor, axis: Axis) -> Tensor:
    """R → P: zero but on rank 0, forward and backward."""
    if axis.size == 1:
        return x
    return _once_replicated(x, axis)


def rotate(x: Tensor, to: Tensor, axis: Axis, by: int) -> Any:
    """Begins to send x to the rank `by` further along the axis, and to receive as much into `to`;
    both are flat.

    The result has `wait`; both tensors must live until then.  It is an all-to-all with one part
    that is not empty: messages would need a group of their own.
    """

    def only(rank: int) -> list[int]:
        """The sizes of the parts where this rank alone has one, of all of x."""
        sizes = [0] * axis.size
        sizes[rank % axis.size] = x.numel()
        return sizes

    return c10d.begin_all_to_all(to, x, axis.group, only(axis.rank - by), only(axis.rank + by))


@contextmanager
def regather(x: Tensor, axis: Axis, dim: int, zigzag: bool = False) -> Generator[Tensor]:
    """S(dim) → R as `all_gather`, but inside the block autograd saves only x of it.

    Backward gathers a second time, when the first consumer needs it, and frees after the last.
    """
    full = all_gather(x, axis, dim, zigzag)
    if axis.size == 1:
        yield full
        return
    line = axis.line()

    def again(x: Tensor) -> Tensor:
        full = gather(x.detach(), axis, dim, zigzag)
        axis.show_to_watch(full, "result in backward", line)
        return full

    with Call(again, (x,), {}).without(full):
        yield full


def all_reduce_(x: Tensor, axis: Axis, dtype: torch.dtype | None = None) -> Tensor:
    """Sum over the axis in place, outside autograd: flat gradients, counts, scalars.  Returns x.

    With `dtype`, x is sent and summed in it.
    """
    if axis.size > 1:
        sent = x.to(dtype or x.dtype)
        cast(Any, dist).all_reduce(sent, group=axis.group)
        if sent is not x:
            x.copy_(sent)
        axis.show_to_watch(x, "result")
    return x


def reduce_scatter_(x: Tensor, axis: Axis, dtype: torch.dtype | None = None) -> Tensor:
    """Sum over the axis; each rank keeps its part, in place and outside autograd: flat gradients.

    Returns this rank's part, a view of x; the other parts of x are then worthless.  With `dtype`,
    x is sent and summed in it.
    """
    if axis.size == 1:
        return x
    result, sent = _own_part(x, axis), x.to(dtype or x.dtype)
    part = _own_part(sent, axis)
    c10d.reduce_scatter(part, sent, axis.group)
    if sent is x:
        return result
    return result.copy_(part)


def all_gather_(x: Tensor, axis: Axis) -> Tensor:
    """Every rank's part of a flat buffer to all ranks of the axis, in place and outside autograd.

    Returns x.
    """
    if axis.size > 1:
        c10d.all_gather(x, _own_part(x, axis), axis.group)
        axis.show_to_watch(x, "result")
    return x


def _own_part(x: Tensor, axis: Axis) -> Tensor:
    size = x.numel() // axis.size
    return x[axis.rank * size : (axis.rank + 1) * size]
