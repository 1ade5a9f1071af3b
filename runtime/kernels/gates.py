"""Gated linear units (Shazeer, arXiv:2002.05202): silu(a) · b and gelu(a) · b, elementwise.

    silu(a) = a · σ(a)                         slope σ(a) · (1 + a · (1 − σ(a)))
    gelu(a) = a · Φ(a)                         slope Φ(a) + a · φ(a)
    gelu(a) = a · (1 + tanh(w)) / 2            w = √(2/π) · (a + 0.044715 · a³)   (Hendrycks,
        Gimpel, arXiv:1606.08415)

    da = g · b · slope(a)      db = g · activation(a)

Backward recomputes the activation: only a and b are saved.  Where these are slices of one product
(`fused_linear`), so are da and db, and backward takes one product for both.
"""
# pyright: basic
# (Triton has no types.)

import math
from typing import Any, Literal, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from ..comm.functional_collectives import distinct
from ..ops.fused_linear import empty_adjacent_like
from . import launching
from .launching import Tile, Tiled, blocks, matrix

Kind = Literal["silu", "gelu", "gelu_tanh"]

_KINDS: dict[str, Kind] = {"none": "gelu", "tanh": "gelu_tanh"}


@triton.jit
def _activation_and_slope(a, KIND: tl.constexpr):
    """The activation of a, and its slope."""
    if KIND == "silu":
        s = tl.sigmoid(a)
        return a * s, s * (1 + a * (1 - s))
    if KIND == "gelu":
        below = 0.5 * (1 + tl.math.erf(a * 0.7071067811865476))
        return a * below, below + a * 0.3989422804014327 * tl.exp(-0.5 * a * a)
    slope = 1.5957691216057308 * (1 + 0.134145 * a * a)  # of 2w
    s = tl.sigmoid(1.5957691216057308 * a * (1 + 0.044715 * a * a))  # (1 + tanh(w)) / 2 is σ(2w)
    return a * s, s + a * s * (1 - s) * slope


@triton.jit
def gate_forward(
    a, b, out, a_stride, b_stride, rows,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < WIDTH)
    gate = tl.load(a + row * a_stride + column, mask=inside, other=0.0).to(tl.float32)
    value, _ = _activation_and_slope(gate, KIND)  # pyright: ignore[reportGeneralTypeIssues]
    value *= tl.load(b + row * b_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_backward(
    g, a, b, da, db, g_stride, a_stride, b_stride, d_stride, rows,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < WIDTH)
    grad = tl.load(g + row * g_stride + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(a + row * a_stride + column, mask=inside, other=0.0).to(tl.float32)
    value, slope = _activation_and_slope(gate, KIND)  # pyright: ignore[reportGeneralTypeIssues]
    other = tl.load(b + row * b_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        da + row * d_stride + column, (grad * other * slope).to(da.dtype.element_ty), mask=inside
    )
    tl.store(db + row * d_stride + column, (grad * value).to(db.dtype.element_ty), mask=inside)


class SiluMul(Tiled[Tile]):
    """silu(a) · b; tiles by the size of the last dim.  Saves a and b."""

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """a and b [..., f], of one shape."""
        return _apply_gate(a, b, "silu", self.tile_for(a.shape[-1], a, b))


class GeluMul(Tiled[Tile]):
    """gelu(a) · b; tiles by the size of the last dim.  Saves a and b."""

    def __call__(
        self, a: Tensor, b: Tensor, approximate: Literal["none", "tanh"] = "none"
    ) -> Tensor:
        """a and b [..., f], of one shape; approximate as in torch.nn.functional.gelu."""
        return _apply_gate(a, b, _KINDS[approximate], self.tile_for(a.shape[-1], a, b))


def _apply_gate(a: Tensor, b: Tensor, kind: Kind, tile: Tile | None) -> Tensor:
    assert a.shape == b.shape, "gates: the two halves are multiplied element by element"
    return cast(Any, _Gate).apply(a, b, kind, tile)


class _Gate(Function):
    """The gate by a kernel or by torch, which save the same tensors."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, kind: Kind, tile: Tile | None) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.how = (kind, tile)
        if tile is None:
            return distinct(
                (_torch_activation_and_slope(a, kind)[0] * b).to(
                    torch.promote_types(a.dtype, b.dtype)
                )
            )
        out = torch.empty(a.shape, dtype=torch.promote_types(a.dtype, b.dtype), device=a.device)
        _launch(gate_forward, (a, b), (out,), (), kind, tile)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (a, b), (kind, tile) = (
            grad_outputs,
            cast(tuple[Tensor, ...], ctx.saved_tensors),
            ctx.how,
        )
        if tile is None:
            value, slope = _torch_activation_and_slope(a, kind)
            # not allocated before: the activation takes more memory while it is computed
            da, db = empty_adjacent_like([a, b])
            return da.copy_(slope.mul_(g).mul_(b)), db.copy_(value.mul_(g)), None, None
        da, db = empty_adjacent_like([a, b])
        _launch(
            gate_backward, (g, a, b), (da, db), (matrix(da, a.shape[-1]).stride(0),), kind, tile
        )
        return da, db, None, None


def _launch(
    kernel: Any,
    operands: tuple[Tensor, ...],
    results: tuple[Tensor, ...],
    strides: tuple[int, ...],
    kind: Kind,
    tile: Tile,
) -> None:
    """Launches a kernel with the row strides of the operands, and `strides` of results that are not
    dense.
    """
    width = results[0].shape[-1]
    matrices = [matrix(x, width) for x in operands]
    rows = matrices[0].shape[0]
    launching.launch(
        kernel,
        (blocks(rows, tile.rows), blocks(width, tile.across(width))),
        *(*matrices, *results, *(x.stride(0) for x in matrices), *strides, rows),
        KIND=kind,
        **tile.options(width, tile.across(width)),
    )


def _torch_activation_and_slope(a: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """The activation of a, and its slope, in float32 at least."""
    a = a.to(torch.promote_types(a.dtype, torch.float32))
    if kind == "silu":
        s = a.sigmoid()
        return a * s, s * (1 + a * (1 - s))
    if kind == "gelu":
        below = 0.5 * (1 + torch.erf(a * math.sqrt(0.5)))
        return a * below, below + a * torch.exp(-0.5 * a * a) / math.sqrt(2 * math.pi)
    double = 2 * math.sqrt(2 / math.pi)
    s = torch.sigmoid(double * (a + 0.044715 * a**3))
    return a * s, s + a * s * (1 - s) * double * (1 + 3 * 0.044715 * a * a)
