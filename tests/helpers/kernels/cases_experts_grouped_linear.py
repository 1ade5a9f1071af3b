"""Products of rows with the weights of their experts against one product for each."""

import torch
from torch import Tensor

from helpers.kernels.cases import PRECISIONS, Precision, check_against, randn
from scalec.runtime.comm.experts import Groups
from scalec.runtime.kernels import GroupedLinear, Product, Products

SIZES = [
    ((3, 0, 17, 1), 24, 40),
    ((0, 0, 5), 16, 16),
    ((33,), 7, 19),
    ((0, 0), 8, 8),
    ((1, 2, 3, 4, 5, 6), 70, 33),
]
"""Rows of each expert, width of x and of the result."""
SMALL = Products(Product(16, 16, 16, warps=4, stages=1), Product(16, 32, 16, warps=4, stages=1))


class Given(Groups):
    """Groups of these sizes."""

    def __init__(self, sizes: tuple[int, ...], device: str) -> None:
        self.counts = torch.tensor(sizes, device=device)
        self.sizes = [*sizes]


def _each(x: Tensor, weight: Tensor, sizes: tuple[int, ...]) -> Tensor:
    parts = x.split_with_sizes(list(sizes))
    return torch.cat([part @ each.mT for part, each in zip(parts, weight, strict=True)])


def _check(
    sizes: tuple[int, ...], width: int, out: int, apart: bool, precision: Precision, device: str
) -> None:
    x = randn(sum(sizes), 2 * width if apart else width, precision=precision, device=device)
    weight = randn(len(sizes), out, width, precision=precision, device=device, seed=1)
    op, held = GroupedLinear({width: SMALL}), Given(sizes, device)
    check_against(
        lambda x, weight: op(x[:, :width], weight, held),
        lambda x, weight: _each(x[:, :width], weight, sizes),
        [x, weight],
        precision,
    )


def case_sizes(device: str) -> None:
    for precision in PRECISIONS[device]:
        for number, (sizes, width, out) in enumerate(SIZES):
            _check(sizes, width, out, number % 2 == 0, precision, device)


def examples(device: str, dtype: torch.dtype) -> None:
    """Qwen3-30B-A3B's experts on 8 ranks, Mixtral's, and odd widths."""
    short, wide = dtype == torch.float32, 2 if dtype == torch.float32 else 1
    block = Product(64 if short else 128, 128, 64 // wide, warps=8, stages=2 if short else 3)
    for experts, width, out in ((16, 2048, 768), (8, 4096, 14336), (4, 100, 52)):
        x = torch.empty(64 * experts, width, device=device, dtype=dtype, requires_grad=True)
        weight = torch.empty(experts, out, width, device=device, dtype=dtype, requires_grad=True)
        y = GroupedLinear({width: Products(block, block)})(
            x, weight, Given((64,) * experts, device)
        )
        y.backward(torch.empty_like(y))
