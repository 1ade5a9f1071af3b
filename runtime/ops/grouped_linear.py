"""A linear layer for each expert, on rows that lie expert by expert."""

from functools import partial
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from ..comm.experts import Groups
from .delayed_wgrad import now_or_later


def grouped_linear(x: Tensor, weight: Tensor, held: Groups) -> Tensor:
    """x · weight[e]ᵀ for the rows of each expert e of `held`.  x [rows, i], weight [experts, o, i] or [experts · o, i].

    Saves both.  An expert without rows has gradients of zero.
    """
    return cast(Any, _GroupedLinear).apply(x, weight, held)


def grouped_bias(x: Tensor, bias: Tensor, held: Groups) -> Tensor:
    """x + bias[e] for the rows of each expert e of `held`.  x [rows, o], bias [experts, o].  Saves nothing."""
    return cast(Any, _GroupedBias).apply(x, bias, held)


class _GroupedLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, held: Groups) -> Tensor:
        assert len(x) == held.total, f"grouped_linear: {len(x)} rows where {held.total} were counted"
        ctx.save_for_backward(x, weight)
        ctx.held, ctx.weight = held, weight  # hooks may give back another tensor than the parameter
        return _products(x, _by_expert(weight, held).mT, held)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, weight) = grad_outputs, cast(tuple[Tensor, ...], ctx.saved_tensors)
        gradient, (of_x, of_weight, _) = gradient.contiguous(), ctx.needs_input_grad
        d_x = _products(gradient, _by_expert(weight, ctx.held), ctx.held) if of_x else None
        make = partial(_of_weight, gradient, x.detach(), ctx.held, weight.shape)
        return d_x, now_or_later(ctx.weight, make) if of_weight else None, None


class _GroupedBias(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, held: Groups) -> Tensor:
        ctx.held = held
        return x + bias.repeat_interleave(held.counts, 0, output_size=held.total)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = grad_outputs
        parts = cast(Any, gradient).split(ctx.held.sizes)
        return gradient, torch.stack([part.sum(0) for part in parts]), None


def _products(x: Tensor, weight: Tensor, held: Groups) -> Tensor:
    """x · weight[e] for the rows of each e: [rows, i], [experts, i, o] → [rows, o]."""
    if _is_served(x, weight):
        return F.grouped_mm(x, weight, offs=held.ends)
    out = x.new_empty((len(x), weight.shape[-1]))
    for each, (first, end) in zip(weight, _spans(held), strict=True):
        torch.mm(x[first:end], each, out=out[first:end])
    return out


def _by_expert(weight: Tensor, held: Groups) -> Tensor:
    """[experts, o, i]"""
    return weight.view(len(held.sizes), -1, weight.shape[-1])


def _of_weight(gradient: Tensor, x: Tensor, held: Groups, shape: torch.Size) -> Tensor:
    """gradientᵀ · x over the rows of each expert: [rows, o], [rows, i] → [experts, o, i], in the weight's shape."""
    if _is_served(gradient, x):
        return F.grouped_mm(gradient.mT, x, offs=held.ends).view(shape)
    out = x.new_empty((len(held.sizes), gradient.shape[-1], x.shape[-1]))
    for each, (first, end) in zip(out, _spans(held), strict=True):
        torch.mm(gradient[first:end].mT, x[first:end], out=each)
    return out.view(shape)


def _spans(held: Groups) -> list[tuple[int, int]]:
    """The first row of each group, and that after its last."""
    return list(pairwise(accumulate(held.sizes, initial=0)))


def _is_served(*operands: Tensor) -> bool:
    """Whether `grouped_mm` is right and fast for these: bfloat16, rows of whole 16 bytes, sm_90 or newer, any rows."""
    return all(_is_fit(x) for x in operands)


def _is_fit(x: Tensor) -> bool:
    aligned = not any(size % 8 for size in x.shape[-2:] if x.ndim == 3) and not x.shape[-1] % 8
    return x.dtype == torch.bfloat16 and aligned and x.is_cuda and len(x) > 0
