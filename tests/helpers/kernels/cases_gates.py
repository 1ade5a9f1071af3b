"""Gated linear units against torch's activations."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from helpers.kernels.cases import PRECISIONS, Precision, check_against, moved, randn
from scalec.runtime.kernels import GeluMul, SiluMul, Tile

SIZES = [(7, 1), (1, 7), (127, 6), (5, 127), (3, 40), (0, 8)]


def _check_all(a: Tensor, b: Tensor, tile: Tile, precision: Precision) -> None:
    silu, gelu = SiluMul({a.shape[-1]: tile}), GeluMul({a.shape[-1]: tile})
    check_against(silu, lambda a, b: F.silu(a) * b, [a, b], precision)
    for approximate in ("none", "tanh"):
        ours = partial(gelu, approximate=approximate)
        check_against(
            ours, lambda a, b, how=approximate: F.gelu(a, approximate=how) * b, [a, b], precision
        )


def case_sizes(device: str) -> None:
    for precision in PRECISIONS[device]:
        for shape in SIZES:
            a, b = (randn(*shape, precision=precision, device=device, seed=i) for i in (0, 1))
            _check_all(a, b, Tile(rows=4, warps=4), precision)


def case_columns_in_blocks(device: str) -> None:
    for precision in PRECISIONS[device]:
        a, b = (randn(2, 3, 40, precision=precision, device=device, seed=i) for i in (0, 1))
        _check_all(a, b, Tile(rows=2, warps=4, columns=16), precision)


def case_operands_that_begin_anywhere(device: str) -> None:
    """Their gradient too, which is one number for all."""
    gate = SiluMul({64: Tile(rows=1, warps=4, columns=32)})
    for precision in PRECISIONS[device]:
        a, b = (randn(3, 64, precision=precision, device=device, seed=i) for i in (0, 1))
        check_against(
            lambda *it: gate(*map(moved, it)), lambda a, b: F.silu(a) * b, [a, b], precision
        )
        check_against(
            lambda a, b: gate(a, moved(b)).sum(),
            lambda a, b: (F.silu(a) * b).sum(),
            [a, b],
            precision,
        )


def case_far_from_zero(device: str) -> None:
    """Where exponentials overflow and tails vanish."""
    a = torch.tensor(
        [-1e4, -100.0, -12.0, -0.0, 12.0, 100.0, 1e4], device=device, requires_grad=True
    )
    _check_all(
        a,
        torch.ones(7, device=device, requires_grad=True),
        Tile(rows=1, warps=4),
        PRECISIONS[device][0],
    )


def case_halves_of_one_product(device: str) -> None:
    """Parts of [s, b, 2f], read as they lie."""
    precision = PRECISIONS[device][0]
    both = randn(5, 2, 16, precision=precision, device=device)
    gate = SiluMul({8: Tile(rows=4, warps=4)})
    check_against(
        lambda it: gate(it[..., :8], it[..., 8:]),
        lambda it: F.silu(it[..., :8]) * it[..., 8:],
        [both],
        precision,
    )


def examples(device: str, dtype: torch.dtype) -> None:
    """A feed-forward block of a model of 8 thousand million parameters, whole and over 8 ranks."""
    tiles = {14336: Tile(rows=1, warps=4, columns=1024), 1792: Tile(rows=1, warps=8)}
    for width in tiles:
        a, b = (
            torch.empty(512, width, device=device, dtype=dtype, requires_grad=True)
            for _ in range(2)
        )
        gelu = GeluMul(tiles)
        results = [SiluMul(tiles)(a, b), gelu(a, b), gelu(a, b, approximate="tanh")]
        torch.autograd.backward(results, [torch.empty_like(it) for it in results])
