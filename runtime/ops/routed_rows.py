"""Tokens to rows of their experts, and rows back to tokens: copies and sums by index, in one order, without atomics.

Both take indices of `sort_by_expert` and save them alone, but for `combine`, which saves rows and gates.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from ..comm.experts import Order
from .plain_attention import wide


def dispatch(x: Tensor, order: Order) -> Tensor:
    """[tokens…, h] → [rows, h]: each token's row for each of its experts."""
    return cast(Any, _Dispatch).apply(x, order)


def combine(rows: Tensor, gates: Tensor, order: Order) -> Tensor:
    """[rows, h], [tokens…, k] → [tokens…, h]: Σ gate · row over a token's choices in order, in float32 at least."""
    return cast(Any, _Combine).apply(rows, gates, order)


class _Dispatch(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Order) -> Tensor:
        ctx.order, ctx.shape = order, x.shape
        return x.reshape(-1, x.shape[-1]).index_select(0, _tokens(order))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = grad_outputs
        return _summed(gradient, None, ctx.order).view(ctx.shape), None


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, gates: Tensor, order: Order) -> Tensor:
        ctx.save_for_backward(rows, gates)
        ctx.order = order
        return _summed(rows, gates, order).view(*gates.shape[:-1], rows.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        rows, gates = cast(tuple[Tensor, ...], ctx.saved_tensors)
        order: Order = ctx.order
        gradient = grad_outputs[0].reshape(-1, rows.shape[-1])
        of_rows = gradient.index_select(0, _tokens(order)).to(wide(rows.dtype))
        chosen = order.choices[: order.total]
        of_gates = torch.zeros(gates.numel(), dtype=gates.dtype, device=gates.device)
        of_gates[chosen] = (of_rows * rows).sum(-1).to(gates.dtype)
        of_rows *= gates.flatten()[chosen].unsqueeze(-1)
        return of_rows.to(rows.dtype), of_gates.view(gates.shape), None


def _tokens(order: Order) -> Tensor:
    """The token of each row."""
    return order.choices[: order.total].div(order.rows.shape[-1], rounding_mode="floor")


def _summed(rows: Tensor, gates: Tensor | None, order: Order) -> Tensor:
    """[tokens, h]: of each token its rows, each times its gate, added in the order of its choices."""
    tokens, k = order.rows.shape
    total = rows.new_zeros((tokens, rows.shape[-1]), dtype=wide(rows.dtype))
    if not order.total:
        return total.to(rows.dtype)
    factors = None if gates is None else gates.reshape(-1, k)
    for choice in range(k):
        at = order.rows[:, choice]
        part = rows.index_select(0, at.clamp(min=0)).to(total.dtype)
        part = part if factors is None else part * factors[:, choice, None]
        total += part if order.total == order.rows.numel() else part.masked_fill_((at < 0).unsqueeze(-1), 0)
    return total.to(rows.dtype)
