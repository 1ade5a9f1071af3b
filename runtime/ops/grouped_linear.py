"""A linear layer for each expert, on rows that lie expert by expert, or on as many rows of each.

torch's `grouped_mm` multiplies where it is right and has a kernel: bfloat16, rows of whole 16
bytes, compute capability 9 or 10.  Elsewhere there is a product for each expert.
"""

from collections.abc import Callable
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from ..comm.experts import Groups
from .delayed_wgrad import now_or_later


class Backend(NamedTuple):
    """The products, as this module has them."""

    products: Callable[[Tensor, Tensor, Groups | None], Tensor]
    of_weight: Callable[[Tensor, Tensor, Groups | None], Tensor]


def products(x: Tensor, weight: Tensor, groups: Groups | None) -> Tensor:
    """x · weight[e] for the rows of each expert e: [rows, i], [experts, i, o] → [rows, o]."""
    if groups is None:
        return torch.bmm(x, weight)
    if is_for_grouped_mm(x, weight):
        return F.grouped_mm(x, weight, offs=groups.ends)
    out = x.new_empty((len(x), weight.shape[-1]))
    for expert_weight, (first, end) in zip(weight, _spans(groups), strict=True):
        torch.mm(x[first:end], expert_weight, out=out[first:end])
    return out


def of_weight(gradient: Tensor, x: Tensor, groups: Groups | None) -> Tensor:
    """gradientᵀ · x over the rows of each expert: [rows, o], [rows, i] → [experts, o, i]; zeros
    where it has none.
    """
    if groups is None:
        return torch.bmm(gradient.mT, x)
    if is_for_grouped_mm(gradient, x):
        whole = F.grouped_mm(gradient.mT, x, offs=groups.ends)
        for expert_gradient, size in zip(whole, groups.sizes, strict=True):
            if not size:
                # on compute capability 10 it is what memory held (pytorch#172439)
                expert_gradient.zero_()
        return whole
    out = x.new_empty((len(groups.sizes), gradient.shape[-1], x.shape[-1]))
    for expert_gradient, (first, end) in zip(out, _spans(groups), strict=True):
        torch.mm(gradient[first:end].mT, x[first:end], out=expert_gradient)
    return out


def is_for_grouped_mm(*operands: Tensor) -> bool:
    """Whether `grouped_mm` multiplies these."""
    return (
        operands[0].is_cuda and _has_kernel(operands[0].device) and all(map(_is_aligned, operands))
    )


def _is_aligned(x: Tensor) -> bool:
    """Whether it is of bfloat16 and not empty, and it and each of its rows begin at a multiple of
    16 bytes.
    """
    if x.dtype != torch.bfloat16 or x.numel() == 0 or x.data_ptr() % 16:
        return False
    return all(stride == 1 or stride % 8 == 0 for stride in x.stride())


@cache
def _has_kernel(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def _spans(groups: Groups) -> list[tuple[int, int]]:
    """The first row of each group, and the row after its last."""
    return list(pairwise(accumulate(groups.sizes, initial=0)))


PLAIN = Backend(products, of_weight)


def grouped_linear(
    x: Tensor, weight: Tensor, groups: Groups | None = None, backend: Backend = PLAIN
) -> Tensor:
    """x · weight[e]ᵀ for the rows of each expert e, as `groups` says.  x [rows, i], weight
    [experts, o, i] or [experts · o, i].

    Without `groups` all experts have as many rows, x [experts, rows, i].  Saves both.  An expert
    without rows has gradients of zero.
    """
    return cast(Any, _GroupedLinear).apply(x, weight, groups, backend)


def grouped_bias(x: Tensor, bias: Tensor, groups: Groups | None = None) -> Tensor:
    """x + bias[e] for the rows of each expert e, as in `grouped_linear`.  bias [experts, o].

    Saves nothing.
    """
    if groups is None:
        return x + bias.unsqueeze(1)
    return cast(Any, _GroupedBias).apply(x, bias, groups)


class _GroupedLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, groups: Groups | None, backend: Backend
    ) -> Tensor:
        rows = None if groups is None else groups.total
        assert rows in (None, len(x)), f"grouped_linear: {len(x)} rows where {rows} were counted"
        ctx.save_for_backward(x, weight)
        # hooks may give back another tensor than the parameter
        ctx.how, ctx.weight = (groups, backend), weight
        return backend.products(x, _by_expert(x, weight, groups).mT, groups)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, weight) = grad_outputs, cast(tuple[Tensor, ...], ctx.saved_tensors)
        (groups, backend), (of_x, of_w, *_) = ctx.how, ctx.needs_input_grad
        gradient = gradient.contiguous()  # `grouped_mm` takes no expanded tensor
        d_x = backend.products(gradient, _by_expert(x, weight, groups), groups) if of_x else None

        def make() -> Tensor:
            return backend.of_weight(gradient, x.detach(), groups).view(weight.shape)

        d_weight: Tensor | None = None
        if of_w:
            d_weight = now_or_later(ctx.weight, make, groups and groups.put_off_gradients)
        return d_x, d_weight, None, None


def _by_expert(x: Tensor, weight: Tensor, groups: Groups | None) -> Tensor:
    """[experts, o, i]"""
    experts = len(x) if groups is None else len(groups.sizes)
    return weight.view(experts, -1, weight.shape[-1])


class _GroupedBias(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, groups: Groups) -> Tensor:
        ctx.held = groups
        return x + bias.repeat_interleave(groups.counts, 0, output_size=groups.total)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = grad_outputs
        parts = cast(Any, gradient).split(ctx.held.sizes)
        return gradient, torch.stack([part.sum(0) for part in parts]), None
