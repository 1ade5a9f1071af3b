"""A linear layer and the softmax statistics of its logits, which are never all in memory.

`LinearSoftmaxStats` is for any part of a vocabulary and any gradient of the loss; `linear_cross_entropy` says what it
costs, and what serves a whole vocabulary.  Source: Wijmans et al. 2024 (arXiv:2411.09009), but no small gradients are
skipped here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from ..comm.mesh import Axis
from ..ops.delayed_wgrad import put_off
from .launching import Tile, tile_for
from .logits import Classes, Parts, add_parts, classes_of, new_parts, product, put_gradient, wide


@dataclass(frozen=True)
class LinearSoftmaxStats:
    """m, z and t of the logits x · weightᵀ + bias, as `LogitSoftmaxStats` has them, without the logits.

    x [..., h], weight [v, h] and bias [v], if there is one, with this rank's part of the vocabulary, labels [...];
    m, z, t [...].  `chunk` columns of logits are made at a time, in the element type of x: a multiple of 128 near
    v / 16, but 4096 or more, keeps products large.

    Saves x, weight, bias, labels and m; backward recomputes each chunk's logits, puts their gradient in their place,
    multiplies it by weight and x, and adds up its rows for the bias.  The gradient of x, P over the axis, adds up
    chunks in float32, each rounded to the element type first; those of weight and bias have their element type.
    Within `set_apart` (`ops/delayed_wgrad`) these two are delayed, with nothing but the saved tensors and the gradients
    of z and t kept for them; they recompute the logits together, once.
    """

    tiles: Mapping[int, Tile]
    chunk: int

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        axis: Axis | None = None,
        classes: int | None = None,
        smoothing: float = 0.0,
        cap: float = 0.0,
        bias: Tensor | None = None,
    ) -> Parts:
        """m, z, t."""
        columns = weight.shape[0]
        here = classes_of(columns, axis, classes, smoothing, cap)
        tile = tile_for(self, self.tiles, columns, x)
        return cast(Any, _LinearParts).apply(x, weight, bias, labels, _Classwise(here, self.chunk, tile))


@dataclass(frozen=True)
class _Classwise:
    """The computation of logits: their classes, and `chunk` columns at a time."""

    classes: Classes
    chunk: int
    tile: Tile | None

    def logits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
        """Columns, and their logits [rows, columns]; the next lie in the same memory."""
        (rows, _), columns = x.shape, weight.shape[0]
        memory = x.new_empty(rows * min(self.chunk, columns))
        for start in range(0, columns, self.chunk):
            part = slice(start, min(start + self.chunk, columns))
            size = part.stop - start
            out = memory[: rows * size].view(rows, size)
            yield part, product(x, weight[part], bias if bias is None else bias[part], out)

    def parts(self, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Parts:
        """m, z, t of all."""
        parts = new_parts(x)
        for columns, logits in self.logits(x, weight, bias):
            add_parts(logits, labels, parts, self.classes.part(columns), self.tile, begins=columns.start == 0)
        return parts


@dataclass(frozen=True, eq=False)
class _Backward:
    """All that the gradients of x, weight and bias are made of, with tokens in rows."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    m: Tensor
    of_parts: tuple[Tensor, Tensor]
    classwise: _Classwise

    def logit_gradients(self) -> Iterator[tuple[slice, Tensor]]:
        """Columns, and the gradient of their logits."""
        classes, tile = self.classwise.classes, self.classwise.tile
        for columns, logits in self.classwise.logits(self.x, self.weight, self.bias):
            put_gradient(logits, logits, self.labels, self.m, self.of_parts, classes.part(columns), tile)
            yield columns, logits

    def gradients(self, of_x: bool, of_weight: bool, of_bias: bool) -> tuple[Tensor | None, ...]:
        """Gradients of x, weight and bias, as asked for; all from the same logits."""
        dx = torch.zeros_like(self.x, dtype=wide(self.x.dtype)) if of_x else None
        dw = torch.empty_like(self.weight) if of_weight else None
        db = self.weight.new_empty(self.weight.shape[0]) if of_bias else None
        for columns, gradient in self.logit_gradients():
            if dx is not None:
                _add_product(dx, gradient, self.weight[columns])
            if dw is not None:
                torch.mm(gradient.mT, self.x, out=dw[columns])
            if db is not None:
                torch.sum(gradient, 0, out=db[columns])
        return dx if dx is None else dx.to(self.x.dtype), dw, db

    def of_weights(self, of_weight: bool, of_bias: bool) -> list[Tensor]:
        """Without that of x, those that are asked for alone."""
        return [it for it in self.gradients(False, of_weight, of_bias) if it is not None]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a · b.  Not all torch versions add a product in few bits to float32 without rounding it first."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


class _LinearParts(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, classwise: _Classwise
    ) -> Parts:
        parts = classwise.parts(x.reshape(-1, x.shape[-1]), weight, bias, labels.reshape(-1).contiguous())
        m, z, t = (part.view(labels.shape) for part in parts)
        ctx.mark_non_differentiable(m)
        ctx.save_for_backward(x, weight, bias, labels, m)
        ctx.weights = weight, bias  # hooks may give back other tensors than the parameters
        ctx.classwise = classwise
        return m, z, t

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        back, shape = _restored(ctx, grad_outputs)
        of_x, *of_weights = cast(tuple[bool, ...], ctx.needs_input_grad[:3])
        wanted = [weight for weight, of in zip(ctx.weights, of_weights, strict=True) if of]
        if put_off(wanted, partial(back.of_weights, *of_weights)):
            of_weights = [False, False]
        dx, dw, db = back.gradients(of_x, *of_weights) if of_x or any(of_weights) else (None, None, None)
        return dx if dx is None else dx.view(shape), dw, db, None, None


def _restored(ctx: Any, grad_outputs: tuple[Tensor, ...]) -> tuple[_Backward, torch.Size]:
    """All that gradients are made of, and the shape of x."""
    x, weight, bias, labels, m = cast(tuple[Any, ...], ctx.saved_tensors)
    rows, bias = x.detach().reshape(-1, x.shape[-1]), bias if bias is None else bias.detach()
    g_z, g_t = (of_part.reshape(-1).contiguous() for of_part in grad_outputs[1:])
    labels = labels.reshape(-1).contiguous()
    return _Backward(rows, weight.detach(), bias, labels, m.view(-1), (g_z, g_t), ctx.classwise), x.shape
