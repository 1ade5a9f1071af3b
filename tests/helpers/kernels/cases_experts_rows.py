"""Rows of experts against indexing, where choices lack rows too."""

from math import prod

import torch
from torch import Tensor

from helpers.kernels.cases import PRECISIONS, Precision, check_against, randn
from scalec.runtime import Experts, Mesh, sort_by_expert
from scalec.runtime.comm.experts import Order
from scalec.runtime.kernels import Combine, Dispatch, Tile

SIZES = [(1, 1, 1), (7, 8, 40), (5, 3, 127), (3, 2, 256), (4, 5, 6), (0, 2, 8)]
"""Tokens, k, width."""
TILES = (
    Tile(rows=1, warps=4),
    Tile(rows=4, warps=4, columns=16),
    Tile(rows=2, warps=4, columns=64),
)
EXPERTS = 12


def order_of(tokens: int, k: int, device: str, least: int = 0, padded: int = 0) -> Order:
    """Rows of random choices; of experts below `least` there are no rows, or padded ones alone."""
    draws = torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(tokens + k))
    ids = draws.argsort(-1)[:, :k]
    return sort_by_expert(
        ids.masked_fill(ids < least, -1).to(device),
        Experts(Mesh({}, device), EXPERTS),
        padded=padded,
    )


def _check(
    tokens: int,
    k: int,
    width: int,
    least: int,
    tile: Tile,
    precision: Precision,
    device: str,
    padded: int = 0,
) -> None:
    order = order_of(tokens, k, device, least, padded)
    total = prod(order.shape)
    x = randn(tokens, width, precision=precision, device=device)
    rows = randn(*order.shape, width, precision=precision, device=device, seed=1)
    gates = randn(tokens, k, precision=precision, device=device, seed=2)
    places = order.rows.cpu()
    chosen = torch.nn.functional.one_hot(places + 1, total + 1)[..., 1:].double()

    def taken(x: Tensor) -> Tensor:
        return torch.einsum("tkr,th->rh", chosen, x).view(rows.shape)

    check_against(lambda x: Dispatch({width: tile})(x, order), taken, [x], precision)

    def combined(rows: Tensor, gates: Tensor) -> Tensor:
        return torch.einsum("tkr,tk,rh->th", chosen, gates, rows.reshape(total, width))

    check_against(
        lambda rows, gates: Combine({width: tile})(rows, gates, order),
        combined,
        [rows, gates],
        precision,
    )


def case_sizes(device: str) -> None:
    for precision in PRECISIONS[device]:
        for number, (tokens, k, width) in enumerate(SIZES):
            _check(tokens, k, width, 0, TILES[number % 3], precision, device)


def case_choices_without_rows(device: str) -> None:
    for precision in PRECISIONS[device]:
        for least in (4, EXPERTS):
            _check(6, 3, 24, least, TILES[1], precision, device)


def case_padded(device: str) -> None:
    """Rows and their gradients are zero where no token chose the expert, whatever memory held
    before.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # so that memory that nothing has written holds NaN
    try:
        for precision in PRECISIONS[device]:
            for number, (tokens, k, width) in enumerate(SIZES[:-1]):
                _check(
                    tokens,
                    k,
                    width,
                    0,
                    TILES[number % 3],
                    precision,
                    device,
                    padded=tokens + number % 2,
                )
            _check(6, 3, 24, 4, TILES[1], precision, device, padded=6)
    finally:
        torch.set_deterministic_debug_mode(before)


def case_gates_in_float32(device: str) -> None:
    """Gates stay in float32 beside rows of any type; gradients are views, and a token has two
    dims.
    """
    order = order_of(6, 2, device)
    rows = torch.randn(order.total, 8, device=device).bfloat16().requires_grad_()
    gates = torch.rand(2, 3, 2, device=device, requires_grad=True)
    found = Combine({8: Tile(rows=2, warps=4)})(rows, gates, order)
    wide = [rows.detach().float().requires_grad_(), gates.detach().requires_grad_()]
    wanted = Combine({})(wide[0], wide[1], order)
    assert found.shape == wanted.shape == (2, 3, 8)
    torch.testing.assert_close(found.float(), wanted, atol=0.02, rtol=0.02)
    one, other = (
        torch.autograd.grad(it.float().sum(), it_of)
        for it, it_of in ((found, [rows, gates]), (wanted, wide))
    )
    torch.testing.assert_close(one[0].float(), other[0], atol=0.01, rtol=0.01)
    torch.testing.assert_close(one[1], other[1], atol=1e-5, rtol=1e-5)


def examples(device: str, dtype: torch.dtype) -> None:
    """Qwen3-30B-A3B's rows and, of two choices, Mixtral's."""
    for k, width in ((8, 2048), (2, 4096), (8, 7168)):
        tile = Tile(rows=1, warps=4, columns=1024)
        order = order_of(512, k, "cpu")
        order.rows, order.choices = order.rows.to(device), order.choices.to(device)
        x = torch.empty(512, width, device=device, dtype=dtype, requires_grad=True)
        gates = torch.empty(512, k, device=device, requires_grad=True)
        out = Combine({width: tile})(Dispatch({width: tile})(x, order), gates, order)
        out.backward(torch.empty_like(out))
