"""A router's choice against its twin, which is held to the formula in float64."""

from itertools import product
from typing import Any

import torch

from helpers.kernels.cases import PRECISIONS, Precision, check_equal, randn
from scalec.runtime import top_k
from scalec.runtime.kernels import Tile, TopK

CHOICES: list[dict[str, Any]] = [
    {"k": 1},
    {"k": 8, "normalise": True},
    {"k": 3, "normalise": True, "scale": 2.5},
    {"k": 2, "scale": 0.5, "bias": True},
    {"k": 4, "groups": 4, "from_groups": 2, "bias": True, "normalise": True},
    {"k": 1, "groups": 12, "from_groups": 3},
]
TILES = (Tile(rows=1, warps=1), Tile(rows=4, warps=4, columns=2))
"""Columns of a tile are for kernels that do not take whole rows: here they change nothing."""


def _check(
    rows: int, experts: int, tile: Tile, precision: Precision, device: str, how: dict[str, Any]
) -> None:
    logits = (
        (3 * randn(rows, experts, precision=precision, device=device)).detach().requires_grad_()
    )
    bias = torch.rand(experts, generator=torch.Generator().manual_seed(1), device="cpu")
    options: dict[str, Any] = how | ({"bias": bias.to(device)} if how.get("bias") else {})
    gates, ids = TopK({experts: tile})(logits, **options)
    wide = logits.detach().double().cpu().requires_grad_()
    exact: dict[str, Any] = options | ({"bias": bias.double()} if how.get("bias") else {})
    want, choices = top_k(wide, **exact)
    assert torch.equal(ids.cpu(), choices)
    assert gates.dtype == torch.float32
    check_equal(gates, want, PRECISIONS[device][0])
    slope = torch.rand(gates.shape, generator=torch.Generator().manual_seed(2))
    (one,), (other,) = (
        torch.autograd.grad(it, [of], slope.to(it)) for it, of in ((gates, logits), (want, wide))
    )
    check_equal(one, other, precision)


def case_choices(device: str) -> None:
    for precision in PRECISIONS[device]:
        for number, (how, score) in enumerate(product(CHOICES, ("softmax", "sigmoid"))):
            _check(7, 12, TILES[number // 2 % 2], precision, device, how | {"score": score})


def case_sizes(device: str) -> None:
    for rows, experts in ((1, 8), (5, 100), (3, 256), (0, 8)):
        _check(rows, experts, TILES[1], PRECISIONS[device][0], device, {"k": 8, "normalise": True})


def case_equal_logits(device: str) -> None:
    """The lower index; of infinitely small ones too, which differ from what is chosen already."""
    chosen = TopK({4: TILES[0]})
    rows = torch.tensor(
        [[0.0, 0.0, 0.0, 0.0], [-torch.inf, 1.0, -torch.inf, -torch.inf]], device=device
    )
    assert chosen(rows, 3)[1].tolist() == [[0, 1, 2], [1, 0, 2]]
    assert chosen(rows[:1], 2, groups=2, from_groups=1)[1].tolist() == [[0, 1]]
    ids = chosen(torch.full((1, 4), torch.nan, device=device), 2)[1]
    assert ids.unique().numel() == 2, "an expert twice"
    assert ids.max() < 4


def examples(device: str, dtype: torch.dtype) -> None:
    """Qwen3-30B-A3B's router, Mixtral's and DeepSeek-V3's."""
    for experts, rows, how in (
        (128, 8, {"k": 8, "normalise": True}),
        (8, 32, {"k": 2}),
        (
            256,
            4,
            {
                "k": 8,
                "score": "sigmoid",
                "normalise": True,
                "groups": 8,
                "from_groups": 4,
                "scale": 2.5,
            },
        ),
    ):
        logits = torch.empty(8192, experts, device=device, requires_grad=True)
        bias = torch.empty(experts, device=device) if "groups" in how else None
        options: dict[str, Any] = how
        gates, _ = TopK({experts: Tile(rows=rows, warps=4)})(logits.to(dtype), bias=bias, **options)
        gates.backward(torch.empty_like(gates))
