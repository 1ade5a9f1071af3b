"""A router's choice: scores, the k largest of them and gates in one pass over logits, and one for
their gradient.

s = softmax(l) over all experts, or σ(l)          chosen: the k largest of s + bias within the
    best groups
gate = scale · s, or scale · s / Σ chosen s       of equal ones the lower index is chosen

u = dgate · gate                                  of the logarithm of the gate
dl = v · slope, − softmax(l) · Σ u                v = u, or u − gate / scale · Σ u where gates
    are normalised slope = 1 − σ(l) of sigmoids; the last term of a softmax alone
"""
# pyright: basic, reportGeneralTypeIssues=false

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops import routing
from ...ops.routing import PLAIN, Backend, Choice, Score
from .. import launching
from ..launching import Tile, Tiled, blocks, matrix, next_power_of_two

LEAST = tl.constexpr(-3.4e38)
"""Values below it are chosen already, or cannot be chosen."""


@triton.jit
def softmax(x, inside):
    """Along rows, of what is inside."""
    x = tl.where(inside, x, float("-inf"))
    weights = tl.exp(x - tl.max(x, 1)[:, None])
    return weights / tl.sum(weights, 1)[:, None]


@triton.jit
def log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1 + tl.exp(-tl.abs(x)))


@triton.jit
def _pick(x, column, SIZE: tl.constexpr):
    """The largest of each row, of equal ones the first: its index, and x without it."""
    best = tl.min(tl.where(x == tl.max(x, 1)[:, None], column, SIZE - 1), 1)
    return best, tl.where(column == best[:, None], float("-inf"), x)


@triton.jit
def _of_best_groups(
    x,
    column,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    GP: tl.constexpr,
    EACH: tl.constexpr,
    OF: tl.constexpr,
):
    """x, −∞ in groups that are not chosen from."""
    group = tl.arange(0, GP)[None, :]
    sums = tl.full([ROWS, GP], float("-inf"), tl.float32)
    for number in tl.static_range(GROUPS):
        group_scores = tl.where(column // EACH == number, x, float("-inf"))
        two = tl.max(group_scores, 1)
        if EACH > 1:
            _, others = _pick(group_scores, column, GROUPS * EACH)
            two += tl.max(others, 1)
        sums = tl.where(group == number, tl.maximum(two, LEAST)[:, None], sums)
    eligible = column < 0
    for _ in tl.static_range(OF):
        best, sums = _pick(sums, group, GROUPS)
        eligible |= column // EACH == best[:, None]
    return tl.where(eligible, x, float("-inf"))


@triton.jit(do_not_specialize=["rows"])
def top_k_forward(
    logits, bias, gates, ids, stride, rows, scale,
    K: tl.constexpr, KP: tl.constexpr, SIGMOID: tl.constexpr, NORMALISE: tl.constexpr,
    GROUPS: tl.constexpr, GP: tl.constexpr, OF: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column, choice = tl.arange(0, COLUMNS)[None, :], tl.arange(0, KP)[None, :]
    valid = column < WIDTH
    x = tl.load(
        logits + row[:, None] * stride + column, mask=(row < rows)[:, None] & valid, other=0.0
    ).to(tl.float32)
    scores = tl.sigmoid(x) if SIGMOID else softmax(x, valid)
    ranks = x
    if bias is not None or GROUPS > 1:
        ranks = scores
        if bias is not None:
            ranks += tl.load(bias + column, mask=valid, other=0.0).to(tl.float32)
    # NaN counts as least
    ranks = tl.where(valid, tl.where(ranks > LEAST, ranks, LEAST), float("-inf"))
    if GROUPS > 1:
        ranks = _of_best_groups(ranks, column, ROWS, GROUPS, GP, WIDTH // GROUPS, OF)
    chosen = tl.zeros([ROWS, KP], tl.int32)
    picked = tl.full([ROWS, KP], 0.0, tl.float32)
    for number in tl.static_range(K):
        best, ranks = _pick(ranks, column, WIDTH)
        value = tl.sum(tl.where(column == best[:, None], x if NORMALISE else scores, 0.0), 1)
        chosen = tl.where(choice == number, best[:, None], chosen)
        picked = tl.where(choice == number, value[:, None], picked)
    if NORMALISE:
        if SIGMOID:
            picked = log_sigmoid(picked)
        picked = softmax(picked, choice < K)
    inside = (row < rows)[:, None] & (choice < K)
    tl.store(gates + row[:, None] * K + choice, picked * scale, mask=inside)
    tl.store(ids + row[:, None] * K + choice, chosen.to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def top_k_backward(
    of_gates, logits, gates, ids, of_logits, stride, rows, scale,
    K: tl.constexpr, SIGMOID: tl.constexpr, NORMALISE: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows)[:, None] & (column < WIDTH)
    total = tl.zeros([ROWS], tl.float32)
    for number in tl.static_range(K):
        offsets = row * K + number
        total += tl.load(of_gates + offsets, mask=row < rows, other=0.0) * tl.load(
            gates + offsets, mask=row < rows, other=0.0
        )
    result = tl.zeros([ROWS, COLUMNS], tl.float32)
    for number in tl.static_range(K):
        offsets = row * K + number
        gate = tl.load(gates + offsets, mask=row < rows, other=0.0)
        value = tl.load(of_gates + offsets, mask=row < rows, other=0.0) * gate
        value -= gate * (total / scale) if NORMALISE else 0.0
        chosen = tl.load(ids + offsets, mask=row < rows, other=0).to(tl.int32)
        result += tl.where(column == chosen[:, None], value[:, None], 0.0)
    if SIGMOID or not NORMALISE:
        x = tl.load(logits + row[:, None] * stride + column, mask=inside, other=0.0).to(tl.float32)
        if SIGMOID:
            result *= tl.sigmoid(-x)
        else:
            result -= softmax(x, column < WIDTH) * total[:, None]
    tl.store(
        of_logits + row[:, None] * WIDTH + column,
        result.to(of_logits.dtype.element_ty),
        mask=inside,
    )


class TopK(Tiled[Tile]):
    """`scalec.runtime.top_k`; tiles by the number of experts.  Saves logits, gates and ids."""

    def __call__(
        self,
        logits: Tensor,
        k: int,
        score: Score = "softmax",
        normalise: bool = False,
        scale: float = 1.0,
        bias: Tensor | None = None,
        groups: int = 1,
        from_groups: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """As `scalec.runtime.top_k`."""
        tile = self.tile_for(logits.shape[-1], logits, bias)
        backend = PLAIN
        if tile is not None:
            backend = Backend(partial(_choose_experts, tile=tile), partial(_gradient, tile=tile))
        return routing.top_k(logits, k, score, normalise, scale, bias, groups, from_groups, backend)


def _choose_experts(
    logits: Tensor, bias: Tensor | None, how: Choice, tile: Tile
) -> tuple[Tensor, Tensor]:
    gates = torch.empty(*logits.shape[:-1], how.k, dtype=torch.float32, device=logits.device)
    ids = torch.empty_like(gates, dtype=torch.int64)
    x = matrix(logits, logits.shape[-1])
    if bias is not None:
        bias = bias.contiguous()
    launching.launch(
        top_k_forward,
        (blocks(len(x), tile.rows),),
        *(x, bias, gates, ids, x.stride(0), len(x), how.scale),
        KP=next_power_of_two(how.k),
        GROUPS=how.groups,
        GP=next_power_of_two(how.groups),
        OF=how.from_groups,
        **_constants(x, how, tile),
    )
    return gates, ids


def _gradient(
    of_gates: Tensor, logits: Tensor, gates: Tensor, ids: Tensor, how: Choice, tile: Tile
) -> Tensor:
    of_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    x = matrix(logits, logits.shape[-1])
    launching.launch(
        top_k_backward,
        (blocks(len(x), tile.rows),),
        *(of_gates.contiguous(), x, gates, ids, of_logits, x.stride(0), len(x), how.scale),
        **_constants(x, how, tile),
    )
    return of_logits


def _constants(x: Tensor, how: Choice, tile: Tile) -> dict[str, int]:
    options = tile.options(x.shape[-1], next_power_of_two(x.shape[-1]))
    return options | {"K": how.k, "SIGMOID": how.score == "sigmoid", "NORMALISE": how.normalise}
