"""Tokens to rows of their experts, and rows back to tokens: copies and sums by index, in one order,
without atomics.

Both take indices of `sort_by_expert` and save them alone, but for `combine`, which saves rows and
gates.
"""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.autograd import Function

from ..comm.experts import Order
from .plain_attention import wide


class Backend(NamedTuple):
    """The copies and sums, as this module has them in plain torch."""

    take_rows: Callable[[Tensor, Order], Tensor]
    sum_rows: Callable[[Tensor, Tensor | None, Order], Tensor]
    spread: Callable[[Tensor, Tensor, Tensor, Order], tuple[Tensor, Tensor]]


def take_rows(x: Tensor, order: Order) -> Tensor:
    """[tokens, h] → [rows, h]: for each row its token, or zeros where it has none."""
    tokens = _tokens(order)
    if not order.padded:
        return x.index_select(0, tokens)
    return x.index_select(0, tokens.clamp(min=0)).masked_fill_((tokens < 0).unsqueeze(-1), 0)


def sum_rows(rows: Tensor, gates: Tensor | None, order: Order) -> Tensor:
    """[rows, h] → [tokens, h]: for each token the sum of its rows, each times its gate [tokens,
    k], in the order of its choices.
    """
    total = rows.new_zeros((len(order.rows), rows.shape[-1]), dtype=wide(rows.dtype))
    if not len(rows):
        return total.to(rows.dtype)
    is_whole = not order.padded and order.total == order.rows.numel()
    for choice, places in enumerate(order.rows.unbind(1)):
        part = rows.index_select(0, places.clamp(min=0)).to(total.dtype)
        if gates is not None:
            part = part * gates[:, choice, None]
        total += part if is_whole else part.masked_fill_((places < 0).unsqueeze(-1), 0)
    return total.to(rows.dtype)


def spread(gradient: Tensor, rows: Tensor, gates: Tensor, order: Order) -> tuple[Tensor, Tensor]:
    """Gradients of `summed` for rows and gates, from the gradient of its result [tokens, h]."""
    of_rows = take_rows(gradient, order).to(wide(rows.dtype))
    products, choices = (of_rows * rows).sum(-1).to(gates.dtype), order.choices[: len(rows)]
    if order.padded:
        of_gates = products[order.rows.clamp(min=0)].where(order.rows >= 0, 0)
    else:
        of_gates = gates.new_zeros(gates.numel())
        of_gates[choices] = products
    of_rows = (of_rows * gates.flatten()[choices].unsqueeze(-1)).to(rows.dtype)
    return of_rows, of_gates.view_as(gates)


def _tokens(order: Order) -> Tensor:
    """The token of each row; −1 where no choice makes it."""
    return order.choices[: prod(order.shape)].div(order.rows.shape[-1], rounding_mode="floor")


PLAIN = Backend(take_rows, sum_rows, spread)


def dispatch(x: Tensor, order: Order, backend: Backend = PLAIN) -> Tensor:
    """[tokens…, h] → [rows, h]: each token's row for each of its experts; padded, [experts,
    rows, h].
    """
    return cast(Any, _Dispatch).apply(x, order, backend)


def combine(rows: Tensor, gates: Tensor, order: Order, backend: Backend = PLAIN) -> Tensor:
    """[rows, h], [tokens…, k] → [tokens…, h]: Σ gate · row over a token's choices in order, in
    float32 at least.
    """
    assert rows.shape[:-1] == order.shape, (
        f"combine: rows {[*rows.shape[:-1]]} where {[*order.shape]} were counted"
    )
    return cast(Any, _Combine).apply(rows, gates, order, backend)


class _Dispatch(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Order, backend: Backend) -> Tensor:
        ctx.how, ctx.shape = (order, backend), x.shape
        return backend.take_rows(x.reshape(-1, x.shape[-1]), order).view(*order.shape, x.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        order, backend = ctx.how
        gradient = grad_outputs[0].reshape(-1, ctx.shape[-1])
        return backend.sum_rows(gradient, None, order).view(ctx.shape), None, None


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, gates: Tensor, order: Order, backend: Backend) -> Tensor:
        ctx.save_for_backward(rows, gates)
        ctx.how = order, backend
        matrix = rows.reshape(-1, rows.shape[-1])
        return backend.sum_rows(matrix, gates.reshape(order.rows.shape), order).view(
            *gates.shape[:-1], rows.shape[-1]
        )

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (rows, gates), (order, backend) = cast(tuple[Tensor, ...], ctx.saved_tensors), ctx.how
        gradient = grad_outputs[0].reshape(-1, rows.shape[-1])
        matrix = rows.reshape(-1, rows.shape[-1])
        of_rows, of_gates = backend.spread(gradient, matrix, gates.reshape(order.rows.shape), order)
        return of_rows.view(rows.shape), of_gates.view(gates.shape), None, None
