"""Root-mean-square and layer norms of rows, with or without a residual added first: autograd, and a
torch twin (Ba et al., arXiv:1607.06450; Zhang and Sennrich, arXiv:1910.07467).

    s = x + y                                        where a residual is added, else s = x
    u = s − mean(s)                                  where centered (layer norm), else u = s
    r = 1 / sqrt(mean(u²) + eps)
    a = u · r · weight + bias

With n = u · r and d = da · weight, the gradients are

    ds = r · (d − n · mean(d · n) − mean(d)) + gs    mean(d) where centered; gs is what arrives
        for s itself
    dweight = Σ da · n    dbias = Σ da               over rows

The sums over rows are taken in two stages: each program adds up its rows, then torch the programs;
always in one order.
"""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from . import launching, norm_kernels
from .launching import Tile, Tiled, blocks, matrix, next_power_of_two

KEPT = 4096
"""Elements of rows that a program's registers hold in backward, beside sums of as many.  A program
with more elements reads rows twice.
"""


class _Norm(Function):
    """The norm by a kernel or by torch, which save the same tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        centered: bool,
        tile: Tile | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if tile is None:
            s, a, mean, root = _forward_torch(x, y, weight, bias, eps, centered)
        else:
            s, a, mean, root = _forward(x, y, weight, bias, eps, centered, tile)
        ctx.save_for_backward(s, weight, mean, root)
        ctx.how = (None if bias is None else bias.dtype, tile)
        if y is None:
            return a
        return s, a

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        *_, da = grad_outputs
        gs = grad_outputs[0] if len(grad_outputs) > 1 else None
        s, weight, mean, root = cast(tuple[Any, ...], ctx.saved_tensors)
        bias_dtype, tile = ctx.how
        backward = _backward_torch if tile is None else partial(_backward, tile=tile)
        ds, *sums = backward(da, gs, s, weight, mean, root, biased=bias_dtype is not None)
        dweight = sums[0].to(weight.dtype).view(weight.shape)
        dbias: Tensor | None = None
        if bias_dtype is not None:
            dbias = sums[1].to(bias_dtype).view(weight.shape)
        dy = ds if len(grad_outputs) > 1 else None
        return ds, dy, dweight, dbias, None, None, None


def _forward(
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    tile: Tile,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    width = weight.numel()
    rows = x.numel() // width
    s = x
    if y is not None:
        s = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, y.dtype), device=x.device)
    a = torch.empty(x.shape, dtype=s.dtype, device=x.device)
    root = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(root) if centered else None
    x = matrix(x, width)
    s_out, y_stride = None, 0  # without a residual the kernel writes no sum
    if y is not None:
        y = matrix(y, width)
        s_out, y_stride = s, y.stride(0)
    weight = weight.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    launching.launch(
        norm_kernels.norm_forward,  # pyright: ignore[reportUnknownMemberType]
        (blocks(rows, tile.rows),),
        *(x, y, weight, bias, s_out, a),
        *(mean, root, x.stride(0), y_stride, rows, eps),
        **tile.options(width, next_power_of_two(width)),
    )
    return s, a, mean, root


def _backward(
    da: Tensor,
    gs: Tensor | None,
    s: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    root: Tensor,
    biased: bool,
    tile: Tile,
) -> tuple[Tensor, ...]:
    """The gradient of s, and the sums of weight and bias, in float32."""
    width = weight.numel()
    ds = torch.empty(s.shape, dtype=s.dtype, device=s.device)
    da, s = matrix(da, width), matrix(s, width)
    gs_stride = 0
    if gs is not None:
        gs = matrix(gs, width)
        gs_stride = gs.stride(0)
    programs = min(tile.programs, blocks(s.shape[0], tile.rows))
    sums = torch.empty(1 + biased, programs, width, dtype=torch.float32, device=s.device)
    launching.launch(
        norm_kernels.norm_backward,  # pyright: ignore[reportUnknownMemberType]
        (programs,),
        *(da, gs, s, weight.contiguous(), mean, root, ds, sums[0], sums[1] if biased else None),
        *(da.stride(0), gs_stride, s.stride(0), s.shape[0]),
        **tile.options(width, next_power_of_two(width)),
        AGAIN=tile.rows * next_power_of_two(width) > KEPT,
    )
    return ds, *sums.sum(1).unbind()


def _forward_torch(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    s = x if y is None else x + y
    u = matrix(s, weight.numel()).to(torch.promote_types(s.dtype, torch.float32))
    mean: Tensor | None = None
    if centered:
        mean = u.mean(1)
        u = u - mean.unsqueeze(1)
    root = (u.square().mean(1) + eps).rsqrt()
    a = u * root.unsqueeze(1) * weight.flatten()
    if bias is not None:
        a = a + bias.flatten()
    return s, a.to(s.dtype).view(s.shape), mean, root


def _backward_torch(
    da: Tensor,
    gs: Tensor | None,
    s: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    root: Tensor,
    biased: bool,
) -> tuple[Tensor, ...]:
    g = matrix(da, weight.numel()).to(root.dtype)
    u = matrix(s, weight.numel()).to(root.dtype)
    n = u if mean is None else u - mean.unsqueeze(1)
    n = n * root.unsqueeze(1)
    d = g * weight.flatten()
    back = d - n * (d * n).mean(1, keepdim=True)
    if mean is not None:
        back = back - d.mean(1, keepdim=True)
    ds = (back * root.unsqueeze(1)).view(s.shape)
    if gs is not None:
        ds = ds + gs
    dweight = (g * n).sum(0)
    if not biased:
        return ds.to(s.dtype), dweight
    dbias = g.sum(0)
    return ds.to(s.dtype), dweight, dbias


def _apply_norm(
    op: Tiled[Tile],
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centered: bool,
) -> Any:
    """a, [...] as x and in its element type; with y (s, a), in the element type of their sum.

    Saved for backward: s, weight, for each row 1 / root and, where centered, mean.  Without a tile
    torch computes it.
    """
    assert y is None or y.shape == x.shape, "norms: a residual is added element by element"
    return cast(Any, _Norm).apply(
        x, y, weight, bias, eps, centered, op.tile_for(weight.numel(), x, y, weight, bias)
    )


class LayerNorm(Tiled[Tile]):
    """(x − mean(x)) / sqrt(var(x) + eps) · weight + bias over the weight's dims, the last of x;
    tiles by its elements.

    Saves x, weight and two numbers in float32 for each row.
    """

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float
    ) -> Tensor:
        """As `scalec.runtime.layer_norm`; x [..., *weight.shape]."""
        return _apply_norm(self, x, None, weight, bias, eps, True)


class AddLayerNorm(Tiled[Tile]):
    """s = x + y and a = layer_norm(s), of s as it is rounded; one pass over memory, and one for
    their gradients.

    Saves s, weight and two numbers in float32 for each row.
    """

    def __call__(
        self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(s, a); x and y [..., *weight.shape]."""
        return _apply_norm(self, x, y, weight, bias, eps, True)


class RMSNorm(Tiled[Tile]):
    """x / sqrt(mean(x²) + eps) · weight over the weight's dims, the last of x; tiles by the number
    of its elements.

    Saves x, weight and one number in float32 for each row.
    """

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As `scalec.runtime.rms_norm`; x [..., *weight.shape]."""
        return _apply_norm(self, x, None, weight, None, eps, False)


class AddRMSNorm(Tiled[Tile]):
    """s = x + y and a = rms_norm(s), of s as it is rounded; one pass over memory, and one for their
    gradients.

    Saves s, weight and one number in float32 for each row.
    """

    def __call__(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(s, a); x and y [..., *weight.shape]."""
        return _apply_norm(self, x, y, weight, None, eps, False)
