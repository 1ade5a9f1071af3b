"""The exchange of experts' rows between the ranks of an axis: an all-to-all of unequal parts, forward and backward."""

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor
from torch.autograd import Function

from .experts import Held

Regroup = Callable[[Tensor, Tensor], Tensor]
"""Of rows [n, …] those at n places, in their order."""


def regrouped(rows: Tensor, places: Tensor) -> Tensor:
    """`Regroup` in plain torch."""
    return rows.index_select(0, places)


def exchange(rows: Tensor, held: Held, regroup: Regroup = regrouped) -> Tensor:
    """Rows of tokens to the ranks of their experts: [rows of tokens, …] → [rows of experts, …]."""
    return rows if held.axis.size == 1 else cast(Any, _Exchange).apply(rows, held, False, regroup)


def exchange_back(rows: Tensor, held: Held, regroup: Regroup = regrouped) -> Tensor:
    """The inverse of `exchange`: [rows of experts, …] → [rows of tokens, …]."""
    return rows if held.axis.size == 1 else cast(Any, _Exchange).apply(rows, held, True, regroup)


class _Exchange(Function):
    """Its own inverse the other way, so backward is forward the other way; nothing is saved."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, held: Held, back: bool, regroup: Regroup) -> Tensor:
        watch = held.axis.watch
        ctx.how = held, back, regroup, watch and watch.here()
        return (_back if back else _there)(rows, held, regroup, ctx.how[-1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        held, back, regroup, line = ctx.how
        return (_there if back else _back)(grad_outputs[0], held, regroup, line), None, None, None


def _there(rows: Tensor, held: Held, regroup: Regroup, line: Any) -> Tensor:
    came = _sent(rows, held, held.sent, held.received, line)
    return came if held.arranged is None else regroup(came, held.arranged)


def _back(rows: Tensor, held: Held, regroup: Regroup, line: Any) -> Tensor:
    by_source = rows if held.returned is None else regroup(rows, held.returned)
    return _sent(by_source, held, held.received, held.sent, line)


def _sent(rows: Tensor, held: Held, to: list[int], of: list[int], line: Any) -> Tensor:
    """What comes, `of` rows of each rank, where this one sends `to` rows to each."""
    assert len(rows) == sum(to), f"exchange: {len(rows)} rows where {sum(to)} were counted"
    axis = held.axis
    if axis.watch is not None:
        axis.watch.exchanged(to, of, axis, line)
    came = rows.new_empty((sum(of), *rows.shape[1:]))
    axis.group.alltoall_base(came, rows.contiguous(), of, to).wait()
    return came
