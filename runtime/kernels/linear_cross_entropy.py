"""A linear layer and the cross entropy of its logits, which are never all in memory.

With 8192 tokens, hidden 4096 and 128256 classes in bfloat16 logits are 2.1 GB and so is their
gradient; a product with the weight takes 8.6 TFLOP.  `chunk` bounds how much of the logits is in
memory at a time, and there are two ways:

                                unfused   LinearSoftmaxStats, chunk 8064   LinearCrossEntropy,
                                    chunk 1024
    products                    3         4; 5 if W is delayed             3
    saved for backward          2.1 GB    m                                dx 67 MB, dW 1.05 GB
    at most, beside dx and dW   3.1 GB    0.27 GB                          0.26 GB
    traffic to sum dx or dW     none      dx, 0.27 GB a chunk              dW, 2.1 GB a chunk
    classes that a rank has     any       any                              all
    gradient of the loss        any       any, for each token              one factor

`LinearSoftmaxStats` iterates over chunks of classes, and recomputes logits in backward, since their
gradient needs the statistics of other chunks and ranks.  A row of dW is computed and rounded once,
as unfused; dx is a sum over chunks.  `LinearCrossEntropy` iterates over chunks of tokens, and has
all of a token's logits at a time.  So forward computes their gradient too, and dx and dW from it;
backward multiplies these by the factor.  dW is a sum over chunks.

The second is for whole vocabularies whose backward follows forward at once, without stages or in
the last one; it takes no more time than unfused.  The first is for all others, as dW would be saved
for each microbatch in flight; where the vocabulary is sharded, logits are smaller by the same
factor, and unfused may do.

Sources: Wijmans et al. 2024 (arXiv:2411.09009), but no small gradients are skipped here; Hsu et al.
2024 (arXiv:2410.10989).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from ..comm.mesh import Axis
from ..ops.delayed_wgrad import put_off
from ..ops.token_losses import token_loss
from .launching import Tile, Tiled
from .logits import Classes, Parts, add_parts, classes_of, new_parts, product, put_gradient, wide


@dataclass(frozen=True, eq=False)
class LinearCrossEntropy(Tiled[Tile]):
    """Sum of token losses of the logits x · weightᵀ + bias, 0-dim, as `CrossEntropy` has it,
    without the logits.

    x [..., h], weight [v, h] and bias [v], if there is one, with the whole vocabulary, labels
    [...], < 0 for none.  Logits of `chunk` tokens are made at a time, 1024 or more for large
    products.

    Where gradients will be asked for, saves the gradients of x, weight and bias for a loss with
    factor 1, in their element types.  The weight's adds up chunks in this type, each sum rounded;
    the bias' in float32, each chunk rounded.  Backward multiplies them in place, and runs only
    once; within `set_apart` the gradients of weight and bias are put off.
    """

    chunk: int

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        classes: int | None = None,
        smoothing: float = 0.0,
        z: float = 0.0,
        cap: float = 0.0,
        bias: Tensor | None = None,
    ) -> Tensor:
        """The loss; `z` weighs the z-loss."""
        operands = [x, weight]
        if bias is not None:
            operands.append(bias)
        needs_gradients = torch.is_grad_enabled() and any(
            operand.requires_grad for operand in operands
        )
        columns = weight.shape[0]
        all_classes = classes_of(columns, None, classes, smoothing, cap)
        tile = self.tile_for(columns, x)
        tokenwise = _Tokenwise(all_classes, self.chunk, tile, z, needs_gradients)
        return cast(Any, _LinearCrossEntropy).apply(x, weight, bias, labels, tokenwise)


@dataclass(frozen=True)
class _Tokenwise:
    """The computation of a loss, `chunk` tokens at a time; if `differentiated`, with gradients."""

    classes: Classes
    chunk: int
    tile: Tile | None
    z_loss: float
    differentiated: bool

    def chunks(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows of x, their loss, and the gradient of their logits.  The next gradient lies in the
        same memory.
        """
        memory = x.new_empty(min(self.chunk, x.shape[0]), weight.shape[0])
        for start in range(0, max(x.shape[0], 1), self.chunk):
            rows = slice(start, min(start + self.chunk, x.shape[0]))
            logits = product(x[rows], weight, bias, memory[: rows.stop - start])
            parts = new_parts(logits)
            add_parts(logits, labels[rows], parts, self.classes, self.tile)
            m, z, t = parts
            loss = token_loss(z, t - m, labels[rows], m if self.z_loss else None, self.z_loss)
            if self.differentiated:
                counts = (labels[rows] >= 0).to(z.dtype)
                through: Tensor | float = 1.0
                if self.z_loss:
                    through = 1 + 2 * self.z_loss * (z.log() + m)
                of_parts = counts * through / z, -counts  # of z and t, as `token_loss` has them
                put_gradient(logits, logits, labels[rows], m, of_parts, self.classes, self.tile)
            yield rows, loss, logits


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        tokenwise: _Tokenwise,
    ) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        of_x, of_weight, of_bias = (
            tokenwise.differentiated and needed for needed in ctx.needs_input_grad[:3]
        )
        dx = torch.empty_like(tokens) if of_x else None
        dw = torch.empty_like(weight) if of_weight else None
        db = weight.new_zeros(weight.shape[0], dtype=wide(x.dtype)) if of_bias else None
        total = tokens.new_zeros((), dtype=wide(x.dtype))
        for rows, loss, gradient in tokenwise.chunks(
            tokens, weight, bias, labels.reshape(-1).contiguous()
        ):
            total += loss
            if dx is not None:
                torch.mm(gradient, weight, out=dx[rows])
            if dw is not None:
                dw.addmm_(gradient.mT, tokens[rows], beta=int(rows.start > 0))
            if db is not None:
                db.add_(gradient.sum(0))
        if db is not None:
            db = db.to(weight.dtype)
        ctx.save_for_backward(dx, dw, db)
        ctx.weights, ctx.shape = (weight, bias), x.shape
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (factor,) = grad_outputs
        dx, dw, db = cast(tuple[Tensor | None, ...], ctx.saved_tensors)
        if dx is not None:
            dx = dx.mul_(factor).view(ctx.shape)
        weights: list[Tensor] = []
        gradients: list[Tensor] = []
        for weight, gradient in zip(ctx.weights, (dw, db), strict=True):
            if gradient is not None:
                weights.append(weight)
                gradients.append(gradient)

        def scaled_gradients() -> list[Tensor]:
            """The gradients of the weights, scaled in place."""
            return [gradient.mul_(factor) for gradient in gradients]

        if put_off(weights, scaled_gradients):
            return dx, None, None, None, None
        scaled_gradients()
        return dx, dw, db, None, None


@dataclass(frozen=True, eq=False)
class LinearSoftmaxStats(Tiled[Tile]):
    """m, z and t of the logits x · weightᵀ + bias, as `LogitSoftmaxStats` has them, without the
    logits.

    x [..., h], weight [v, h] and bias [v], if there is one, with this rank's part of the
    vocabulary, labels [...]; m, z, t [...].  `chunk` columns of logits are made at a time, in the
    element type of x: a multiple of 128 near v / 16, but 4096 or more, keeps products large.

    Saves x, weight, bias, labels and m; backward recomputes each chunk's logits, puts their
    gradient in their place, multiplies it by weight and x, and adds up its rows for the bias.  The
    gradient of x, P over the axis, adds up chunks in float32, each rounded to the element type
    first; the gradients of weight and bias have the element types of weight and bias.  Within
    `set_apart` (`ops/delayed_wgrad`) these two are delayed, with nothing but the saved tensors and
    the gradients of z and t kept for them; they recompute the logits together, once.
    """

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
        local_classes = classes_of(columns, axis, classes, smoothing, cap)
        tile = self.tile_for(columns, x)
        classwise = _Classwise(local_classes, self.chunk, tile)
        return cast(Any, _LinearParts).apply(x, weight, bias, labels, classwise)


@dataclass(frozen=True)
class _Classwise:
    """The computation of logits: their classes, and `chunk` columns at a time."""

    classes: Classes
    chunk: int
    tile: Tile | None

    def logits(
        self, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Columns, and their logits [rows, columns].  The next logits lie in the same memory."""
        (rows, _), columns = x.shape, weight.shape[0]
        memory = x.new_empty(rows * min(self.chunk, columns))
        for start in range(0, columns, self.chunk):
            part = slice(start, min(start + self.chunk, columns))
            size = part.stop - start
            out = memory[: rows * size].view(rows, size)
            part_bias = None if bias is None else bias[part]
            yield part, product(x, weight[part], part_bias, out)


def _gradients(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    m: Tensor,
    of_parts: tuple[Tensor, Tensor],
    classwise: _Classwise,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of x, weight and bias, as far as `wanted`, all from the same logits; tokens are
    in rows.
    """
    if not any(wanted):
        return [None, None, None]
    of_x, of_weight, of_bias = wanted
    dx = torch.zeros_like(x, dtype=wide(x.dtype)) if of_x else None
    dw = torch.empty_like(weight) if of_weight else None
    db = weight.new_empty(weight.shape[0]) if of_bias else None
    for columns, logits in classwise.logits(x, weight, bias):
        classes = classwise.classes.part(columns)
        put_gradient(logits, logits, labels, m, of_parts, classes, classwise.tile)
        if dx is not None and dx.dtype == x.dtype:
            dx.addmm_(logits, weight[columns])
        elif dx is not None:
            # not all torch versions add bfloat16 to float32 without rounding first
            dx.add_(logits @ weight[columns])
        if dw is not None:
            torch.mm(logits.mT, x, out=dw[columns])
        if db is not None:
            torch.sum(logits, 0, out=db[columns])
    if dx is not None:
        dx = dx.to(x.dtype)
    return [dx, dw, db]


class _LinearParts(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        classwise: _Classwise,
    ) -> Parts:
        rows, classes = x.reshape(-1, x.shape[-1]), labels.reshape(-1).contiguous()
        parts = new_parts(rows)
        for columns, logits in classwise.logits(rows, weight, bias):
            part = classwise.classes.part(columns)
            add_parts(logits, classes, parts, part, classwise.tile, begins=columns.start == 0)
        m, z, t = (part.view(labels.shape) for part in parts)
        ctx.mark_non_differentiable(m)
        ctx.save_for_backward(x, weight, bias, labels, m)
        ctx.weights = weight, bias  # hooks may give back other tensors than the parameters
        ctx.classwise = classwise
        return m, z, t

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, labels, m = cast(tuple[Any, ...], ctx.saved_tensors)
        rows = x.detach().reshape(-1, x.shape[-1])
        if bias is not None:
            bias = bias.detach()
        g_z, g_t = (of_part.reshape(-1).contiguous() for of_part in grad_outputs[1:])
        arguments = (
            rows,
            weight.detach(),
            bias,
            labels.reshape(-1).contiguous(),
            m.view(-1),
            (g_z, g_t),
            ctx.classwise,
        )
        of_x, *of_weights = cast(tuple[bool, ...], ctx.needs_input_grad[:3])
        delayed = [weight for weight, needed in zip(ctx.weights, of_weights, strict=True) if needed]
        later = partial(_gradients, *arguments, (False, *of_weights))
        if put_off(delayed, lambda: [gradient for gradient in later() if gradient is not None]):
            of_weights = [False, False]
        dx, dw, db = _gradients(*arguments, (of_x, *of_weights))
        if dx is not None:
            dx = dx.view(x.shape)
        return dx, dw, db, None, None
