"""Rotary positions (Su et al., arXiv:2104.09864) of one tensor, or of queries and keys in one
launch.

    (u, v) → (u · cos − v · sin, v · cos + u · sin)

for u and v the halves of the last dim, or of its first part, by the angle of the position.
Backward rotates them back.
"""
# pyright: basic
# (Triton has no types.)

from math import prod
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from ..comm.functional_collectives import distinct
from . import launching
from .launching import Tile, Tiled, blocks, next_power_of_two


@triton.jit
def _turn(
    x, out, table, first, rows, heads, between, seq, x_token, x_head, plane,
    SIZE: tl.constexpr, TURNED: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    ROWS: tl.constexpr,
    SIGN: tl.constexpr,
):  # fmt: skip
    """Turns `ROWS` rows of x [tokens, heads, SIZE], dense along the last dim, from the row
    `first`.
    """
    row = first + tl.arange(0, ROWS)
    real = (row < rows)[:, None]
    token = row // heads
    source = x + (token.to(tl.int64) * x_token + (row % heads).to(tl.int64) * x_head)[:, None]
    target = out + row.to(tl.int64)[:, None] * SIZE
    column = tl.arange(0, HALF)[None, :]
    inside = real & (column < TURNED // 2)
    angle = table + ((token // between) % seq)[:, None] * TURNED + column
    cosine = tl.load(angle, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(angle + plane + TURNED // 2, mask=inside, other=0.0).to(tl.float32) * SIGN
    u = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(source + TURNED // 2 + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + column, (u * cosine - v * sine).to(out.dtype.element_ty), mask=inside)
    tl.store(
        target + TURNED // 2 + column, (v * cosine + u * sine).to(out.dtype.element_ty), mask=inside
    )
    if REST > 0:
        column = TURNED + tl.arange(0, REST)[None, :]
        inside = real & (column < SIZE)
        tl.store(target + column, tl.load(source + column, mask=inside, other=0.0), mask=inside)


@triton.jit
def rope_kernel(
    q, k, q_out, k_out, table, q_rows, k_rows, q_heads, k_heads, q_token, q_head, k_token, k_head,
    between, seq, plane,
    SIZE: tl.constexpr, TURNED: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    ROWS: tl.constexpr,
    SIGN: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    of_q = tl.cdiv(q_rows, ROWS)
    if block < of_q:
        first = block * ROWS
        _turn(
            q, q_out, table, first, q_rows, q_heads, between, seq, q_token, q_head, plane,
            SIZE, TURNED, HALF, REST, ROWS, SIGN,
        )  # fmt: skip
    elif k is not None:
        first = (block - of_q) * ROWS
        _turn(
            k, k_out, table, first, k_rows, k_heads, between, seq, k_token, k_head, plane,
            SIZE, TURNED, HALF, REST, ROWS, SIGN,
        )  # fmt: skip


class Rope(Tiled[Tile]):
    """`scalec.runtime.rope` in one pass over memory; tiles by the size of the last dim.

    Saves the table alone.
    """

    def __call__(self, x: Tensor, table: Tensor) -> Tensor:
        """x and the result [..., seq, between, d], table [2, seq, 1 …, d or less] of
        `rope_frequencies`.
        """
        (out,) = cast(Any, _Rope).apply(table, self.tile_for(x.shape[-1], x, table), x)
        return out


class RopePair(Tiled[Tile]):
    """`rope` of queries and keys, which may have fewer heads, in one launch; the same tiles.

    Saves the table alone.
    """

    def __call__(self, q: Tensor, k: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """q [..., seq, between, d], k the same but for the last dim between; the results are as
        q and k.
        """
        return cast(Any, _Rope).apply(table, self.tile_for(q.shape[-1], q, k, table), q, k)


class _Rope(Function):
    """The rotation by a kernel or by torch; it is linear in the tensors."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, tile: Tile | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(table)
        ctx.tile = tile
        return tuple(distinct(out) for out in _rotate(tensors, table, tile, 1))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (table,) = cast(tuple[Tensor], ctx.saved_tensors)
        return None, None, *_rotate(grad_outputs, table, ctx.tile, -1)


def _rotate(
    tensors: tuple[Tensor, ...], table: Tensor, tile: Tile | None, sign: int
) -> tuple[Tensor, ...]:
    if tile is None:
        return tuple(_rotate_by_torch(x, table, sign) for x in tensors)
    q, *others = tensors
    k = others[0] if others else None
    return _rotate_by_kernel(q, k, table, tile, sign)


def _rotate_by_torch(x: Tensor, table: Tensor, sign: int) -> Tensor:
    turned = table.shape[-1]
    cosine, sine = table.to(torch.promote_types(x.dtype, torch.float32)).unbind()
    u = x[..., :turned]
    out = (u * cosine + u.roll(turned // 2, -1) * (sign * sine)).to(x.dtype)
    if turned == x.shape[-1]:
        return out
    return torch.cat([out, x[..., turned:]], -1)


def _rotate_by_kernel(
    q: Tensor, k: Tensor | None, table: Tensor, tile: Tile, sign: int
) -> tuple[Tensor, ...]:
    seq, size, turned, dims = table.shape[1], q.shape[-1], table.shape[-1], table.ndim - 3
    assert q.shape[-2 - dims] == seq, "rope: a table of another length"
    assert k is None or (k.shape[: -1 - dims], k.shape[-1]) == (q.shape[: -1 - dims], size), (
        "rope: q and k differ"
    )
    outs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k) if x is not None]
    between = prod(q.shape[-1 - dims : -2])
    table, q = table.contiguous(), _by_head(q, dims)
    q_rows = q.shape[0] * q.shape[1]
    # Without k no block reads the numbers that stand for it.
    k_out, k_rows, k_heads, k_strides = None, 0, 1, (0, 0)
    if k is not None:
        k = _by_head(k, dims)
        k_rows, k_heads = k.shape[0] * k.shape[1], k.shape[1]
        k_out, k_strides = outs[1], (k.stride(0), k.stride(1))
    half = next_power_of_two(turned // 2)
    rest = 0
    if turned < size:
        rest = next_power_of_two(size - turned)
    # more threads would have less than 16 bytes each
    parts = tile.rows * half * q.element_size() // 16
    launching.launch(
        rope_kernel,
        (blocks(q_rows, tile.rows) + blocks(k_rows, tile.rows),),
        *(q, k, outs[0], k_out, table, q_rows, k_rows),
        *(q.shape[1], k_heads, q.stride(0), q.stride(1)),
        *k_strides,
        *(between, seq, table.stride(0)),
        warps=min(tile.warps, max(parts // 32, 1)),
        SIZE=size,
        TURNED=turned,
        HALF=half,
        REST=rest,
        ROWS=tile.rows,
        SIGN=sign,
    )
    return tuple(outs)


def _by_head(x: Tensor, between: int) -> Tensor:
    """x as [tokens, heads, d], dense along d.  The heads are the last of the `between` dims that
    lie between sequence and d; without such dims there is one head.

    A copy where tokens are not evenly spaced.
    """
    heads = x.shape[-2] if between else 1
    flat = x.reshape(x.shape[:-1].numel() // heads, heads, x.shape[-1])
    return flat if flat.stride(2) == 1 else flat.contiguous()
