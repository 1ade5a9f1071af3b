"""Rotary positions of one tensor and of queries with keys, against the runtime's plain function."""

from collections.abc import Callable

import torch
from torch import Tensor

from helpers.kernels.cases import PRECISIONS, check_against, moved, randn
from scalec.runtime import rope
from scalec.runtime.kernels import Rope, RopePair, Tile

TILE = Tile(rows=4, warps=4)


def _table(seq: int, between: int, size: int, device: str) -> Tensor:
    """As `rope_frequencies` makes it: cosines twice, and sines with both signs."""
    angle = torch.rand(seq, size // 2, generator=torch.Generator().manual_seed(5)) * 6
    halves = torch.stack([angle.cos().repeat(1, 2), torch.cat([-angle.sin(), angle.sin()], 1)])
    return halves.view(2, seq, *(1 for _ in range(between)), size).to(device)


def _plain(table: Tensor) -> Callable[..., tuple[Tensor, ...]]:
    wide = table.cpu().double()
    return lambda *tensors: tuple(rope(x, wide) for x in tensors)


def _check(
    shapes: tuple[tuple[int, ...], ...], seq: int, between: int, turned: int, device: str
) -> None:
    """Shapes of one tensor, or of queries and keys."""
    table = _table(seq, between, turned, device)
    tiles = {shapes[0][-1]: TILE}
    for precision in PRECISIONS[device]:
        tensors = [
            randn(*shape, precision=precision, device=device, seed=i)
            for i, shape in enumerate(shapes)
        ]
        op = Rope(tiles) if len(shapes) == 1 else RopePair(tiles)
        check_against(lambda *it, op=op: op(*it, table), _plain(table), tensors, precision)


def case_sequence_first(device: str) -> None:
    _check(((5, 2, 3, 8),), 5, 2, 8, device)
    _check(((5, 2, 3, 8), (5, 2, 1, 8)), 5, 2, 8, device)


def case_batch_first(device: str) -> None:
    _check(((2, 7, 3, 8),), 7, 1, 8, device)
    _check(((2, 7, 3, 8), (2, 7, 2, 8)), 7, 1, 8, device)


def case_without_heads(device: str) -> None:
    _check(((3, 7, 8),), 7, 0, 8, device)


def case_odd_sizes_and_parts_of_the_last_dim(device: str) -> None:
    _check(((127, 1, 1, 2),), 127, 2, 2, device)
    _check(((1, 3, 14),), 1, 1, 6, device)
    _check(((4, 2, 3, 10), (4, 2, 1, 10)), 4, 2, 4, device)
    _check(((0, 2, 3, 8), (0, 2, 1, 8)), 0, 2, 8, device)


def case_slices_of_one_product(device: str) -> None:
    """Queries and keys as parts of [s, b, (n + 2k) · d], read as they lie; transposed ones are
    copied.
    """
    precision, table = PRECISIONS[device][0], _table(5, 2, 8, device)
    qkv = randn(5, 2, 40, precision=precision, device=device)

    def parts(qkv: Tensor) -> tuple[Tensor, Tensor]:
        return qkv[..., :24].unflatten(-1, (3, 8)), qkv[..., 24:32].unflatten(-1, (1, 8))

    pair = RopePair({8: TILE})
    check_against(
        lambda it: pair(*parts(it), table), lambda it: _plain(table)(*parts(it)), [qkv], precision
    )
    x = randn(8, 3, 2, 5, precision=precision, device=device)
    turned = Rope({8: TILE})
    check_against(
        lambda it: turned(it.permute(3, 2, 1, 0), table),
        lambda it: _plain(table)(it.permute(3, 2, 1, 0)),
        [x],
        precision,
    )


def case_operands_that_begin_anywhere(device: str) -> None:
    """The table too."""
    table, pair = _table(5, 2, 16, device), RopePair({16: TILE})
    for precision in PRECISIONS[device]:
        q, k = (randn(5, 2, heads, 16, precision=precision, device=device) for heads in (4, 2))
        check_against(
            lambda q, k: pair(moved(q), moved(k), moved(table)), _plain(table), [q, k], precision
        )


def examples(device: str, dtype: torch.dtype) -> None:
    """Heads of 128, whole, and of 256, in part."""
    tiles = {128: Tile(rows=32, warps=4), 256: Tile(rows=16, warps=4)}
    for size, turned in ((128, 128), (256, 64)):
        q = torch.empty(512, 2, 8, size, device=device, dtype=dtype, requires_grad=True)
        k = torch.empty(512, 2, 2, size, device=device, dtype=dtype, requires_grad=True)
        table = torch.empty(2, 512, 1, 1, turned, device=device, dtype=dtype)
        results = [Rope(tiles)(q, table), *RopePair(tiles)(q, k, table)]
        torch.autograd.backward(results, [torch.empty_like(it) for it in results])
