"""The exchange of experts' rows between the ranks of an axis: an all-to-all of unequal parts,
forward and backward.

With `async_op` an exchange begins, and `wait` gives the rows that it brings; computation in between
runs beside it.  Backward begins the inverse at the `wait`, and waits for it where forward began.
Autograd runs its newest nodes first, so the gradients of the computation in between run beside the
inverse.  Gradients of experts' weights do, too: backward leaves them (`Groups.left`) for the
exchange that brings gradients of rows back to their tokens.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast, overload

from torch import Tensor
from torch.autograd import Function

from . import c10d
from .experts import ExpertRows

Regroup = Callable[[Tensor, Tensor], Tensor]
"""A function that picks the rows at n places out of [n, …], in their order."""


def regroup_rows(rows: Tensor, places: Tensor) -> Tensor:
    """`Regroup` in plain torch."""
    return rows.index_select(0, places)


class Arriving(NamedTuple):
    """Rows that are under way, for `wait`.  token: [], stands in autograd for rows that have not
    come.
    """

    token: Tensor
    way: "_Way | None"


@overload
def exchange(rows: Tensor, expert_rows: ExpertRows) -> Tensor: ...
@overload
def exchange(rows: Tensor, expert_rows: ExpertRows, async_op: Literal[True]) -> Arriving: ...
def exchange(rows: Tensor, expert_rows: ExpertRows, async_op: bool = False) -> Tensor | Arriving:
    """Rows of tokens to the ranks of their experts: [rows of tokens, …] → [rows of experts, …]."""
    return start_exchange(rows, expert_rows, False, async_op, regroup_rows)


@overload
def exchange_back(rows: Tensor, expert_rows: ExpertRows) -> Tensor: ...
@overload
def exchange_back(rows: Tensor, expert_rows: ExpertRows, async_op: Literal[True]) -> Arriving: ...
def exchange_back(
    rows: Tensor, expert_rows: ExpertRows, async_op: bool = False
) -> Tensor | Arriving:
    """The inverse of `exchange`: [rows of experts, …] → [rows of tokens, …]."""
    return start_exchange(rows, expert_rows, True, async_op, regroup_rows)


def wait(rows: Arriving) -> Tensor:
    """The rows of an exchange that has begun, when they have come; once."""
    if rows.way is None:
        return rows.token
    return cast(Any, _Wait).apply(*rows)


def start_exchange(
    rows: Tensor, expert_rows: ExpertRows, back: bool, async_op: bool, regroup: Regroup
) -> Any:
    """`exchange` or, if `back`, its inverse; `regroup` puts rows in order."""
    if expert_rows.axis.size == 1:
        return Arriving(rows, None) if async_op else rows
    way = _Way(expert_rows, back, regroup)
    if async_op:
        return Arriving(cast(Any, _Begin).apply(rows, way), way)
    return cast(Any, _Exchange).apply(rows, way)


class _Way:
    """An exchange to the ranks of the experts or, if `back`, of the tokens, and its inverse: one at
    a time is under way.
    """

    __slots__ = ("_line", "_regroup", "_under_way", "back", "expert_rows")

    def __init__(self, expert_rows: ExpertRows, back: bool, regroup: Regroup) -> None:
        self.expert_rows, self.back = expert_rows, back
        self._regroup, self._line = regroup, expert_rows.axis.line()
        # the work and its buffers, which it needs until it is done
        self._under_way: tuple[Any, Tensor, Tensor] | None = None

    def begin(self, rows: Tensor, back: bool) -> None:
        """Begins to send rows, and to receive."""
        expert_rows, axis = self.expert_rows, self.expert_rows.axis
        send_counts, receive_counts = expert_rows.sent, expert_rows.received
        if back:
            send_counts, receive_counts = receive_counts, send_counts
        assert len(rows) == sum(send_counts), (
            f"exchange: {len(rows)} rows where {sum(send_counts)} were counted"
        )
        if axis.watch is not None:
            axis.watch.see_exchange(send_counts, receive_counts, axis, self._line)
        sent = (
            rows
            if not back or expert_rows.returned is None
            else self._regroup(rows, expert_rows.returned)
        )
        sent, came = sent.contiguous(), rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        self._under_way = (
            c10d.begin_all_to_all(came, sent, axis.group, receive_counts, send_counts),
            came,
            sent,
        )

    def end(self, back: bool) -> Tensor:
        """The rows that have come, in their order."""
        assert self._under_way is not None, "exchange: rows are awaited that are not under way"
        (work, came, _), self._under_way = self._under_way, None
        work.wait()
        if back or self.expert_rows.arranged is None:
            return came
        return self._regroup(came, self.expert_rows.arranged)


class _Exchange(Function):
    """An exchange and its inverse, one after the other: backward is forward in the other direction.
    Nothing is saved.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        way.begin(rows, way.back)
        return way.end(way.back)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        way: _Way = ctx.way
        way.begin(grad_outputs[0], not way.back)
        return way.end(not way.back), None


class _Begin(Function):
    """Begins an exchange.  Its gradient arrives by the exchange that `_Wait` begins in backward;
    the token has none.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        ctx.set_materialize_grads(False)
        way.begin(rows, way.back)
        return rows.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        return ctx.way.end(not ctx.way.back), None


class _Wait(Function):
    """Waits for an exchange.  Backward begins the inverse, and then makes the gradients of weights
    that were left for it.
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        expert_rows = way.expert_rows
        if ctx.needs_input_grad[0] and not way.back and expert_rows.put_off_gradients is None:
            expert_rows.put_off_gradients = []
        return way.end(way.back)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        way: _Way = ctx.way
        way.begin(grad_outputs[0], not way.back)
        if not way.back:
            while way.expert_rows.put_off_gradients:
                way.expert_rows.put_off_gradients.pop(0)()
        return None, None
