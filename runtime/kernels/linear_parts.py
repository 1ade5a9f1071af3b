"""The parts of cross entropy, of the logits of a product, which never stand in memory as a whole.

Purpose: `LinearParts`, for any part of a vocabulary and any gradient of the loss; `linear_cross_entropy` says what it
costs, and what does for a whole vocabulary.
Source: Wijmans et al. 2024 (arXiv:2411.09009), of whose gradients nothing is left out here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from ..deferred import put_off
from ..mesh import Axis
from .classes import Classes, classes_of
from .launching import Tile, tile_for
from .logits import Parts, add_parts, new_parts, put_gradient, wide


@dataclass(frozen=True)
class LinearParts:
    """m, z and t of the logits x · weightᵀ, as `LogitParts` has them, without the logits.

    x [..., h], weight [v, h] with this rank's part of the vocabulary, labels [...]; m, z, t [...].  `chunk` columns of
    logits are made at a time, in the element type of x: a multiple of 128 near v / 16, but 4096 or more, keeps
    products large.

    Saves x, weight, labels and m; backward makes each chunk's logits again, puts their gradient in their place, and
    multiplies it by weight and x.  The gradient of x, P over the axis, adds up chunks in float32, each rounded to the
    element type first; that of the weight has its element type.  Within `set_apart` (`scalec.runtime.deferred`) it is
    put off, with x, weight and the gradients of z and t as all that is kept; it then makes the logits once more.
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
    ) -> Parts:
        """m, z, t."""
        columns = weight.shape[0]
        here = classes_of(columns, axis, classes, smoothing, cap)
        tile = tile_for(self, self.tiles, columns, x)
        return cast(Any, _LinearParts).apply(x, weight, labels, _Classwise(here, self.chunk, tile))


@dataclass(frozen=True)
class _Classwise:
    """How logits are made: of which classes, so many columns at a time."""

    classes: Classes
    chunk: int
    tile: Tile | None

    def logits(self, x: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Columns, and their logits [rows, columns]; the next lie in the same memory."""
        (rows, _), columns = x.shape, weight.shape[0]
        memory = x.new_empty(rows * min(self.chunk, columns))
        for start in range(0, columns, self.chunk):
            part = slice(start, min(start + self.chunk, columns))
            size = part.stop - start
            yield part, torch.mm(x, weight[part].mT, out=memory[: rows * size].view(rows, size))

    def parts(self, x: Tensor, weight: Tensor, labels: Tensor) -> Parts:
        """m, z, t of all."""
        parts = new_parts(x)
        for columns, logits in self.logits(x, weight):
            add_parts(logits, labels, parts, self.classes.part(columns), self.tile, begins=columns.start == 0)
        return parts


@dataclass(frozen=True, eq=False)
class _Backward:
    """All that the gradients of x and weight are made of, with tokens in rows."""

    x: Tensor
    weight: Tensor
    labels: Tensor
    m: Tensor
    of_parts: tuple[Tensor, Tensor]
    classwise: _Classwise

    def logit_gradients(self) -> Iterator[tuple[slice, Tensor]]:
        """Columns, and the gradient of their logits."""
        classes, tile = self.classwise.classes, self.classwise.tile
        for columns, logits in self.classwise.logits(self.x, self.weight):
            put_gradient(logits, logits, self.labels, self.m, self.of_parts, classes.part(columns), tile)
            yield columns, logits

    def gradients(self, of_x: bool, of_weight: bool) -> tuple[Tensor | None, Tensor | None]:
        """Those of x and weight, as asked for; both from the same logits."""
        dx = torch.zeros_like(self.x, dtype=wide(self.x.dtype)) if of_x else None
        dw = torch.empty_like(self.weight) if of_weight else None
        for columns, gradient in self.logit_gradients():
            if dx is not None:
                _add_product(dx, gradient, self.weight[columns])
            if dw is not None:
                torch.mm(gradient.mT, self.x, out=dw[columns])
        return dx if dx is None else dx.to(self.x.dtype), dw

    def of_weight(self) -> Tensor:
        """The weight's alone."""
        _, dw = self.gradients(of_x=False, of_weight=True)
        assert dw is not None
        return dw


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a · b.  Not all torch versions add a product in few bits to float32 without rounding it first."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


class _LinearParts(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, classwise: _Classwise) -> Parts:
        parts = classwise.parts(x.reshape(-1, x.shape[-1]), weight, labels.reshape(-1).contiguous())
        m, z, t = (part.view(labels.shape) for part in parts)
        ctx.mark_non_differentiable(m)
        ctx.save_for_backward(x, weight, labels, m)
        ctx.weight = weight  # hooks may give back another tensor than the parameter
        ctx.classwise = classwise
        return m, z, t

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, labels, m = cast(tuple[Tensor, ...], ctx.saved_tensors)
        g_z, g_t = (of_part.reshape(-1).contiguous() for of_part in grad_outputs[1:])
        rows = x.detach().reshape(-1, x.shape[-1])
        back = _Backward(rows, weight.detach(), labels.reshape(-1).contiguous(), m.view(-1), (g_z, g_t), ctx.classwise)
        of_x, of_weight = ctx.needs_input_grad[:2]
        now = of_weight and not put_off(ctx.weight, back.of_weight)
        dx, dw = back.gradients(of_x, now) if of_x or now else (None, None)
        return dx if dx is None else dx.view(x.shape), dw, None, None
