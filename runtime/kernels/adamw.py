"""AdamW over flat shards in one pass: scaled gradients in, parameters, moments and working
copies out.
"""
# pyright: basic

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ..state import optimizers
from ..state.optimizers import Part
from . import launching
from .launching import Tile


@triton.jit
def _one_minus_exp(x):
    """1 − exp(x) for x ≤ 0: near 0, where the difference would lose its digits, by Taylor's
    series.
    """
    near = -x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7))))))
    return tl.where(x > -0.25, near, 1 - tl.exp(x))


@triton.jit
def _adamw(
    parameters, gradients, exp_avg, exp_avg_sq, copies,  # [layers, size]; copies may be None
    step, skip, scale,  # scalars; scale may be None
    parameters_stride, gradients_stride, slots_stride, copies_stride, size,
    lr, decay, fresh1, fresh2, log_beta1, log_beta2, eps,  # fresh: 1 − β
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """One layer's block of COLUMNS elements."""
    start = tl.program_id(0).to(tl.int64) * COLUMNS
    layer = tl.program_id(1).to(tl.int64)
    offsets = tl.arange(0, COLUMNS)
    # A skipped step has no branch: nothing is left to do, and gradients that are not finite do no
    # harm.
    mask = offsets < tl.where(tl.load(skip) == 0, size - start, 0)
    parameters += layer * parameters_stride + start
    gradients += layer * gradients_stride + start
    exp_avg += layer * slots_stride + start
    exp_avg_sq += layer * slots_stride + start
    p = tl.load(parameters + offsets, mask, other=0.0).to(tl.float32)
    g = tl.load(gradients + offsets, mask, other=0.0).to(tl.float32)
    m = tl.load(exp_avg + offsets, mask, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq + offsets, mask, other=0.0).to(tl.float32)
    if scale is not None:
        g *= tl.load(scale).to(tl.float32)
    m += fresh1 * (g - m)
    v += fresh2 * (g * g - v)
    t = tl.load(step)
    bias1, bias2 = _one_minus_exp(t * log_beta1), _one_minus_exp(t * log_beta2)
    p -= decay * p
    p -= lr / bias1 * tl.div_rn(m, tl.sqrt_rn(v) * (1 / tl.sqrt_rn(bias2)) + eps)
    tl.store(parameters + offsets, p.to(parameters.dtype.element_ty), mask)
    tl.store(exp_avg + offsets, m.to(exp_avg.dtype.element_ty), mask)
    tl.store(exp_avg_sq + offsets, v.to(exp_avg_sq.dtype.element_ty), mask)
    if copies is not None:
        copies += layer * copies_stride + start
        tl.store(copies + offsets, p.to(copies.dtype.element_ty), mask)


@dataclass(frozen=True)
class AdamW(optimizers.AdamW):
    """Adam with decoupled weight decay (arXiv:1711.05101), one launch for a group's part of all
    layers of a bucket.

    g = gradient · scale;  m += (1 − β₁)(g − m);  v += (1 − β₂)(g² − v);
    p −= lr · decay · p + lr · m / (1 − β₁ᵗ) / (√(v / (1 − β₂ᵗ)) + eps);  copy = p in its
        element type.

    All tensors are [layers, elements], with elements side by side; inside everything is in
    float32.  The gradients stay as they are.  An element moves 28 bytes in float32, and 2 more for
    a bfloat16 copy.  Elsewhere (`launching`) it is the optimizer of torch's kernels, which it
    equals up to rounding.
    """

    tile: Tile = Tile(rows=1, warps=4, columns=1024)

    def update(
        self, part: Part, lr: float, step: Tensor, skip: Tensor, scale: Tensor | None = None
    ) -> None:
        """One update in place."""
        p, g, m, v = (
            part.parameters,
            part.gradients,
            part.slots["exp_avg"],
            part.slots["exp_avg_sq"],
        )
        (layers, size), copies = p.shape, part.copies
        if launching.tile_for(self, {size: self.tile}, size, p, g, copies) is None:
            super().update(part, lr, step, skip, scale)
            return
        lr *= part.group.lr_scale
        log_betas = [math.log(beta) if beta else -math.inf for beta in self.betas]
        numbers = (
            *(lr, lr * part.group.weight_decay),
            *(1 - beta for beta in self.betas),
            *log_betas,
            self.eps,
        )
        copies_stride = 0 if copies is None else copies.stride(0)
        strides = (p.stride(0), g.stride(0), m.stride(0), copies_stride)
        if layers == 1:
            # The strides of one layer are not used, and would be odd where its size is.
            strides = (0, 0, 0, 0)
        for span in launching.evenly(size):
            copies_span = None if copies is None else copies[:, span]
            launching.launch(
                _adamw,
                (launching.blocks(span.stop - span.start, self.tile.columns), layers),
                *(p[:, span], g[:, span], m[:, span], v[:, span], copies_span),
                *(step, skip, scale),
                *strides,
                *(span.stop - span.start, *numbers),
                warps=self.tile.warps,
                COLUMNS=self.tile.columns,
            )
