"""Attention and the merge of partial results, against plain formulas."""

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from kernels.cases import PRECISIONS, Precision, check_against, randn
from scalec.runtime.kernels.attention import Attention, Block, Blocks

SMALL = Blocks(*(Block(queries=16, keys=16, warps=4, stages=1) for _ in range(3)))
UNEVEN = Blocks(Block(32, 16, warps=4, stages=1), Block(16, 32, warps=4, stages=1), Block(32, 16, warps=4, stages=1))
DIMS = (5, 16, 24)

OPTIONS: Mapping[str, Sequence[Any]] = {
    "seq": (0, 1),
    "batch": (1, 2),
    "heads": ((1, 1), (2, 1), (4, 2)),
    "dim": DIMS,
    "causal": (True, False),
    "window": (0, 1, 5, 19, 100),
    "softcap": (0.0, 1.5),
    "scale": (None, 0.5),
    "documents": (False, True),
    "place": ((1, 1, 0), (7, 7, 0), (33, 33, 0), (48, 48, 0), (16, 33, 17), (33, 16, -9), (18, 40, -20), (7, 0, 0)),
    "blocks": (SMALL, UNEVEN),
}
"""place: queries, keys, and how far the first query stands behind the first key."""


def attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq: int,
    causal: bool,
    window: int,
    scale: float | None,
    softcap: float,
    q_documents: Tensor | None,
    k_documents: Tensor | None,
    shift: int,
) -> tuple[Tensor, Tensor]:
    """The formula, all scores at once: the result, and the log-sum-exp [b, n, s]."""
    q, k, v = (x.movedim(seq, -2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * (scores / softcap).tanh() if softcap else scores
    distance = torch.arange(q.shape[-2]).unsqueeze(1) + shift - torch.arange(k.shape[-2])
    sees = (distance >= 0) | torch.tensor(not causal)
    sees = sees & (distance.abs() < window) if window else sees
    if q_documents is not None and k_documents is not None:
        own, theirs = (ids.cpu().movedim(seq, -1)[:, None] for ids in (q_documents, k_documents))
        sees = sees & (own.unsqueeze(-1) == theirs.unsqueeze(-2))
    weights = scores.exp() * sees
    total = weights.sum(-1, keepdim=True)
    lse = total.log().squeeze(-1)
    some = total.masked_fill(total == 0, 1)
    return (weights / some @ v).movedim(-2, seq), torch.where(total.squeeze(-1) == 0, -torch.inf, some.log().squeeze(-1))


def _pairwise(options: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Settings in which any two options meet in all their values, always the same ones."""
    draw = random.Random(0)

    def drawn() -> tuple[Any, ...]:
        return tuple(draw.choice(range(len(values))) for values in options.values())

    def pairs(chosen: tuple[Any, ...]) -> set[Any]:
        return set(combinations(enumerate(chosen), 2))

    missing: set[Any] = set().union(*(pairs(drawn()) for _ in range(5000)))
    while missing:
        best = max((drawn() for _ in range(200)), key=lambda chosen: len(pairs(chosen) & missing))
        missing -= pairs(best)
        yield {name: values[i] for (name, values), i in zip(options.items(), best, strict=True)}


def _ids(length: int, batch: int, seq: int, device: str, first: int) -> Tensor:
    """Documents of 1 to 9 tokens, others in each sample."""
    samples = [torch.arange(length).add(first + 40 * i).div(3 + 2 * i, rounding_mode="floor") for i in range(batch)]
    return torch.stack(samples, 1 - seq).to(device)


def _check(precision: Precision, device: str, **given: Any) -> None:
    seq, batch, (heads, kv_heads), dim = (given[name] for name in ("seq", "batch", "heads", "dim"))
    queries, keys, shift = given["place"]

    def tensor(length: int, heads: int, seed: int) -> Tensor:
        rows = (length, batch) if seq == 0 else (batch, length)
        return randn(*rows, heads, dim, precision=precision, device=device, seed=seed)

    ids = [_ids(length, batch, seq, device, first) for length, first in ((queries, max(shift, 0)), (keys, 0))]
    options = {name: given[name] for name in ("seq", "causal", "window", "scale", "softcap")} | {"shift": shift}
    options |= dict(zip(("q_documents", "k_documents"), ids if given["documents"] else (None, None), strict=True))
    partial = Attention(dict.fromkeys(DIMS, given["blocks"])).partial
    check_against(
        lambda *qkv: _finite(*partial(*qkv, **options)),
        lambda *qkv: _finite(*attended(*qkv, **options)),
        [tensor(queries, heads, 0), tensor(keys, kv_heads, 1), tensor(keys, kv_heads, 2)],
        precision,
    )


def _finite(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The log-sum-exp in the element type of the result, −9 for −∞."""
    return out, lse.masked_fill(lse == -torch.inf, -9).to(out.dtype)


def case_options(device: str) -> None:
    for precision in PRECISIONS[device]:
        for given in _pairwise(OPTIONS):
            _check(precision, device, **given)
