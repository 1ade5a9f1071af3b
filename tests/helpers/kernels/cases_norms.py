"""RMS and layer norms, with and without a residual, against plain formulas."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from helpers.kernels.cases import PRECISIONS, Precision, check_against, moved, randn
from helpers.reference_ops import layer_norm, rms_norm
from scalec.runtime.kernels import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm, Tile

EPS = 1e-5
SIZES = [(7, 1), (1, 7), (127, 6), (5, 127), (3, 256), (0, 8), (9, 1100)]
"""Rows and width: more programs than rows, and fewer; tails of both; the last are read twice in
backward.
"""


def _tiles(width: int, rows: int = 4, programs: int = 3) -> dict[int, Tile]:
    return {width: Tile(rows=rows, warps=4, programs=programs)}


rms, layer = partial(rms_norm, eps=EPS), partial(layer_norm, eps=EPS)
"""The definitions, in the element type of x."""


def _of_a_sum(
    norm: Callable[..., Tensor], dtype: torch.dtype
) -> Callable[..., tuple[Tensor, Tensor]]:
    """x + y as the element type has it, and its norm; the gradient is that of the exact sum."""

    def both(x: Tensor, y: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        s = x + y
        s = s + (s.to(dtype).double() - s).detach()
        return s, norm(s, *others)

    return both


def _check_all(shape: Sequence[int], weight_dims: int, precision: Precision, device: str) -> None:
    own = tuple(shape)[-weight_dims:]
    x, y = (randn(*shape, precision=precision, device=device, seed=i) for i in (0, 1))
    weight, bias = (randn(*own, precision=precision, device=device, seed=i) for i in (2, 3))
    tiles = _tiles(weight.numel())
    rms_of_sum, layer_of_sum = (_of_a_sum(norm, precision.dtype) for norm in (rms, layer))
    check_against(partial(RMSNorm(tiles), eps=EPS), rms, [x, weight], precision)
    check_against(partial(LayerNorm(tiles), eps=EPS), layer, [x, weight], precision)
    check_against(partial(LayerNorm(tiles), eps=EPS), layer, [x, weight, bias], precision)
    check_against(partial(AddRMSNorm(tiles), eps=EPS), rms_of_sum, [x, y, weight], precision)
    check_against(partial(AddLayerNorm(tiles), eps=EPS), layer_of_sum, [x, y, weight], precision)
    check_against(
        partial(AddLayerNorm(tiles), eps=EPS), layer_of_sum, [x, y, weight, bias], precision
    )


def case_sizes(device: str) -> None:
    for precision in PRECISIONS[device]:
        for rows, width in SIZES:
            _check_all((rows, width), 1, precision, device)


def case_weights_of_several_dims(device: str) -> None:
    for precision in PRECISIONS[device]:
        _check_all((3, 2, 5, 4), 2, precision, device)


def case_operands_that_are_not_contiguous(device: str) -> None:
    """Slices of wider rows, which are read as they lie, and transposed ones, which are copied."""
    for precision in PRECISIONS[device]:
        wide = randn(6, 3, 20, precision=precision, device=device)
        weight = randn(9, precision=precision, device=device, seed=2)
        norm = RMSNorm(_tiles(9))
        for x in (wide[..., 4:13], wide.transpose(0, 1)[..., :9], wide[..., ::2][..., :9]):
            check_against(partial(norm, eps=EPS), rms, [x, weight], precision)


def case_operands_that_begin_anywhere(device: str) -> None:
    for precision in PRECISIONS[device]:
        x, y = (randn(5, 64, precision=precision, device=device, seed=i) for i in (0, 1))
        weight, bias = (randn(64, precision=precision, device=device, seed=i) for i in (2, 3))
        layer_of_sum = _of_a_sum(layer, precision.dtype)
        norm = partial(AddLayerNorm(_tiles(64)), eps=EPS)
        check_against(
            lambda *it: norm(*map(moved, it)),  # noqa: B023
            layer_of_sum,
            [x, y, weight, bias],
            precision,
        )


def case_weights_of_another_element_type(device: str) -> None:
    """The result has that of x, each gradient that of its operand."""
    weight = torch.ones(8, dtype=torch.bfloat16, device=device, requires_grad=True)
    x = torch.randn(3, 8, device=device, requires_grad=True)
    a = RMSNorm(_tiles(8))(x, weight, eps=EPS)
    gradients = torch.autograd.grad(a.sum(), [x, weight])
    assert [it.dtype for it in (a, *gradients)] == [torch.float32, torch.float32, torch.bfloat16]


def case_the_sums_of_many_programs_are_the_same_each_time(device: str) -> None:
    x, weight = (
        torch.randn(64, 32, device=device),
        torch.ones(32, device=device, requires_grad=True),
    )
    norm = RMSNorm(_tiles(32, rows=1, programs=16))
    first, second = (
        torch.autograd.grad(norm(x, weight, eps=EPS).square().sum(), weight)[0] for _ in range(2)
    )
    assert torch.equal(first, second)


RMS_TILES = {
    128: Tile(rows=16, warps=4, programs=1056),
    4096: Tile(rows=1, warps=8, programs=528),
    8192: Tile(rows=1, warps=8),
    16384: Tile(rows=1, warps=16, programs=132),
}
LAYER_TILES = {
    128: Tile(rows=16, warps=4, programs=528),
    4096: Tile(rows=1, warps=8),
}
"""For an H100."""


def examples(device: str, dtype: torch.dtype) -> None:
    """The widths of heads, and of models of 8, 70 and 405 thousand million parameters."""
    for width in RMS_TILES:
        x, y, weight, _ = _empty(width, device, dtype)
        _differentiate(
            RMSNorm(RMS_TILES)(x, weight, eps=EPS), *AddRMSNorm(RMS_TILES)(x, y, weight, eps=EPS)
        )
    for width in LAYER_TILES:
        x, y, weight, bias = _empty(width, device, dtype)
        add = AddLayerNorm(LAYER_TILES)
        _differentiate(
            LayerNorm(LAYER_TILES)(x, weight, bias, eps=EPS), *add(x, y, weight, bias, eps=EPS)
        )


def _empty(width: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    """x, y, weight and bias."""
    shapes = [(32768, width), (32768, width), (width,), (width,)]
    return [torch.empty(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]


def _differentiate(*results: Tensor) -> None:
    torch.autograd.backward(results, [torch.empty_like(it) for it in results])
