"""A router's losses against their formulas: few and many experts, tokens that all choose one,
choices without rows.
"""

from functools import partial

import torch
from torch import Tensor

from helpers.kernels.cases import PRECISIONS, Precision, check_against, randn
from scalec.runtime import balance
from scalec.runtime.kernels import Balance, RouterZ, Tile
from scalec.runtime.ops.routing import Score

SIZES = [(1, 1, 1, 1), (2, 5, 3, 2), (3, 40, 16, 8), (1, 33, 100, 4), (2, 1, 128, 8), (2, 0, 4, 2)]
"""Sequences, tokens of each, experts, k."""
SCORES: tuple[Score, ...] = ("softmax", "sigmoid")
TILES = (
    Tile(rows=1, warps=1),
    Tile(rows=4, warps=4, programs=2),
    Tile(rows=16, warps=4, columns=2),
)
"""Columns of a tile are for kernels that do not take whole rows: here they change nothing."""


def _shares(logits: Tensor, score: Score) -> Tensor:
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def _balance(logits: Tensor, ids: Tensor, score: Score, seq: int) -> Tensor:
    """Token by token."""
    length, (experts, k) = logits.shape[seq], (logits.shape[-1], ids.shape[-1])
    total = logits.new_zeros(())
    for tokens, chosen in zip(logits.unbind(1 - seq), ids.unbind(1 - seq), strict=True):
        counts = torch.stack([(chosen == expert).sum() for expert in range(experts)])
        total = total + (counts * experts / (k * length) * _shares(tokens, score).mean(0)).sum()
    return 0.25 * total


def _logits(*shape: int, precision: Precision, device: str) -> Tensor:
    return (3 * randn(*shape, precision=precision, device=device)).detach().requires_grad_()


def _ids(batch: int, length: int, experts: int, k: int) -> Tensor:
    """Different experts of each token."""
    return torch.rand(batch, length, experts, generator=torch.Generator().manual_seed(k)).argsort(
        -1
    )[..., :k]


def _check(
    size: tuple[int, int, int, int],
    score: Score,
    seq: int,
    tile: Tile,
    precision: Precision,
    device: str,
) -> None:
    batch, length, experts, k = size
    shape = (batch, length) if seq else (length, batch)
    logits = _logits(*shape, experts, precision=precision, device=device)
    ids = _ids(*shape, experts, k)
    ids = ids.masked_fill(
        torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.2, -1
    )
    op = partial(Balance({experts: tile}), by=0.25, score=score, seq=seq)
    check_against(
        lambda x: op(x, ids.to(device)).to(precision.dtype),
        lambda x: _balance(x, ids, score, seq),
        [logits],
        precision,
    )


def case_balance(device: str) -> None:
    for precision in PRECISIONS[device]:
        for number, size in enumerate(size for size in SIZES if size[1]):
            for seq, score in enumerate(SCORES):
                _check(size, score, (seq + number) % 2, TILES[number % 3], precision, device)


def case_balance_of_no_tokens_is_none(device: str) -> None:
    op = Balance({4: TILES[0]})
    logits, ids = (
        torch.empty(0, 6, 4, device=device),
        torch.empty(0, 6, 2, dtype=torch.int64, device=device),
    )
    assert op(logits, ids, by=0.25).item() == 0.0


def case_all_tokens_to_one_expert(device: str) -> None:
    """The loss is then the number of experts times the expert's mean share, as many of which
    are tokens'.
    """
    logits = torch.zeros(2, 50, 8, device=device)
    logits[..., 3] = 20.0
    ids = torch.full((2, 50, 1), 3, device=device)
    torch.testing.assert_close(
        Balance({8: TILES[1]})(logits, ids, by=0.5), torch.tensor(8.0, device=device)
    )


def case_views(device: str) -> None:
    """Logits of which each other is another's, and a gradient that is none of their kind."""
    whole = torch.randn(2, 6, 10, device=device, requires_grad=True)
    ids = _ids(2, 6, 5, 2).to(device)
    for loss, plain in (
        (Balance({5: TILES[2]}), balance),
        (
            lambda x, _, by: RouterZ({5: TILES[2]})(x, by),
            lambda x, _, by: by * x.logsumexp(-1).square().sum(),
        ),
    ):
        for half in (whole[..., ::2], whole[..., 5:]):
            (one,), (other,) = (
                torch.autograd.grad(3 * it(half, ids, by=0.5), [whole]) for it in (loss, plain)
            )
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def case_router_z(device: str) -> None:
    for precision in PRECISIONS[device]:
        for number, (batch, length, experts, _) in enumerate(SIZES):
            _check_z(
                RouterZ({experts: TILES[number % 3]}), (batch, length, experts), precision, device
            )


def _check_z(op: RouterZ, shape: tuple[int, int, int], precision: Precision, device: str) -> None:
    check_against(
        lambda x: op(x, 0.01).to(precision.dtype),
        lambda x: 0.01 * x.exp().sum(-1).log().square().sum(),
        [_logits(*shape, precision=precision, device=device)],
        precision,
    )


def examples(device: str, dtype: torch.dtype) -> None:
    """Qwen3-30B-A3B's router, Mixtral's and DeepSeek-V3's."""
    routers: tuple[tuple[int, int, int, Score], ...] = (
        (128, 8, 8, "softmax"),
        (8, 32, 2, "softmax"),
        (256, 4, 8, "sigmoid"),
    )
    for experts, rows, k, score in routers:
        logits = torch.empty(2, 4096, experts, device=device, dtype=dtype, requires_grad=True)
        ids, tiles = (
            torch.empty(2, 4096, k, dtype=torch.int64, device=device),
            {experts: Tile(rows=rows, warps=4)},
        )
        (Balance(tiles)(logits, ids, 0.01, score) + RouterZ(tiles)(logits, 0.001)).backward()
