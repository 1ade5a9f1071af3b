"""Attention, against a plain formula."""

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, islice, product
from typing import Any

import torch
from torch import Tensor

from helpers.kernels.cases import PRECISIONS, Precision, check_against, check_equal, moved, randn
from scalec.runtime.kernels import Attention, Block, Blocks, RingAttention
from scalec.runtime.ops.plain_attention import Setting
from scalec.runtime.ops.ring_attention import PLAIN

SMALL = Blocks(*(Block(queries=16, keys=16, warps=4, stages=1) for _ in range(3)))
UNEVEN = Blocks(
    Block(32, 16, warps=4, stages=1),
    Block(16, 32, warps=4, stages=1),
    Block(32, 16, warps=4, stages=1),
)
FLOAT32 = {
    64: Blocks(
        Block(32, 32, warps=4, stages=2),
        Block(32, 32, warps=8, stages=2),
        Block(32, 32, warps=4, stages=2),
    ),
}
DIMS = (5, 16, 24)

OPTIONS: Mapping[str, Sequence[Any]] = {
    "seq": (0, 1),
    "batch": (1, 2),
    "heads": ((1, 1), (2, 1), (4, 2)),
    "dim": DIMS,
    "causal": (True, False),
    "window": (0, 1, 9),
    "softcap": (0.0, 1.5),
    "scale": (None, 0.5),
    "documents": (False, True),
    "place": ((1, 1, 0), (41, 41, 0), (16, 33, 17), (33, 16, -9), (18, 20, -20)),
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
    """The formula, all scores at once: the result, and the log-sum-exp [b, n, s], without a
    gradient.
    """
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
    some = total.masked_fill(total == 0, 1)
    lse = some.log().masked_fill(total == 0, -torch.inf).squeeze(-1)
    return (weights / some @ v).movedim(-2, seq), lse.detach()


def _pairwise(options: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Settings in which any two options meet in all their values, always the same ones."""
    draw, places = random.Random(0), [range(len(values)) for values in options.values()]

    def pairs(chosen: Sequence[int]) -> set[Any]:
        return set(combinations(enumerate(chosen), 2))

    columns = [[(i, place) for place in row] for i, row in enumerate(places)]
    missing = {pair for one, other in combinations(columns, 2) for pair in product(one, other)}
    while missing:
        best = max(
            ([draw.choice(row) for row in places] for _ in range(50)),
            key=lambda drawn: len(pairs(drawn) & missing),
        )
        missing -= pairs(best)
        yield {name: values[i] for (name, values), i in zip(options.items(), best, strict=True)}


def _ids(length: int, batch: int, seq: int, device: str, first: int) -> Tensor:
    """Documents of 1 to 9 tokens, others in each sample."""
    samples = [
        torch.arange(length).add(first + 40 * i).div(3 + 2 * i, rounding_mode="floor")
        for i in range(batch)
    ]
    return torch.stack(samples, 1 - seq).to(device)


def _check(precision: Precision, device: str, **given: Any) -> None:
    seq, batch, (heads, kv_heads), dim = (given[name] for name in ("seq", "batch", "heads", "dim"))
    queries, keys, shift = given["place"]

    def tensor(length: int, heads: int, seed: int) -> Tensor:
        rows = (length, batch) if seq == 0 else (batch, length)
        return randn(*rows, heads, dim, precision=precision, device=device, seed=seed)

    ids = [
        _ids(length, batch, seq, device, first)
        for length, first in ((queries, max(shift, 0)), (keys, 0))
    ]
    options = {name: given[name] for name in ("seq", "causal", "window", "scale", "softcap")} | {
        "shift": shift
    }
    options |= dict(
        zip(
            ("q_documents", "k_documents"), ids if given["documents"] else (None, None), strict=True
        )
    )
    partial = Attention(dict.fromkeys(DIMS, given["blocks"])).partial
    check_against(
        lambda *qkv: _finite(*partial(*qkv, **options)),
        lambda *qkv: _finite(*attended(*qkv, **options)),
        [tensor(queries, heads, 0), tensor(keys, kv_heads, 1), tensor(keys, kv_heads, 2)],
        precision,
        # a query that sees one key has scores without gradients: differences of Σ dout · v over a
        # head, which are 0
        least=dim**0.5 if given["window"] == 1 else 1.0,
    )


def _finite(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The log-sum-exp in the element type of the result, −9 for −∞."""
    return out, lse.masked_fill(lse == -torch.inf, -9).to(out.dtype)


def case_options(device: str) -> None:
    """Every eighth of the combinations."""
    for precision in PRECISIONS[device]:
        for given in islice(_pairwise(OPTIONS), 0, None, 8):
            _check(precision, device, **given)


def case_all_options(device: str) -> None:
    for precision in PRECISIONS[device]:
        for given in _pairwise(OPTIONS):
            _check(precision, device, **given)


def case_no_queries_or_no_keys(device: str) -> None:
    for precision in PRECISIONS[device]:
        for place in ((7, 0, 0), (0, 7, 0)):
            given = {name: values[0] for name, values in OPTIONS.items()}
            _check(precision, device, **given | {"place": place})


def _compare(partial: Any, qkv: Sequence[Tensor], precision: Precision, *options: Any) -> None:
    check_against(
        lambda *it: _finite(*partial(*it, *options)),
        lambda *it: attended(*it, *options),
        qkv,
        precision,
    )


def case_operands_that_are_not_contiguous(device: str) -> None:
    """Slices of one tensor, which are read as they lie, and every second element, which are
    copied.
    """
    for precision in PRECISIONS[device]:
        wide = randn(2, 20, 4, 32, precision=precision, device=device)
        for part, seq in (
            (wide[..., 8:24], 1),
            (wide[..., ::2], 1),
            (wide.transpose(0, 1)[..., 16:], 0),
        ):
            qkv = [part[:, :, :2], part[:, :, 2:3], part[:, :, 3:]]
            _compare(
                Attention({16: SMALL}).partial,
                qkv,
                precision,
                seq,
                True,
                0,
                None,
                0.0,
                None,
                None,
                0,
            )


def case_operands_that_begin_anywhere(device: str) -> None:
    for precision in PRECISIONS[device]:
        qkv = [
            moved(randn(1, 40, 2, 16, precision=precision, device=device, seed=i)) for i in range(3)
        ]
        _compare(
            Attention({16: UNEVEN}).partial, qkv, precision, 1, True, 9, None, 1.5, None, None, 0
        )


def case_documents_in_any_order(device: str) -> None:
    """Documents of which each stands in several places, with far-off numbers."""
    ids = torch.tensor([5, 5, 2**40, 2**40, 5, -(2**50), -1, 2**40] * 5, device=device).view(-1, 1)
    for precision in PRECISIONS[device]:
        qkv = [randn(40, 1, 2, 16, precision=precision, device=device, seed=i) for i in range(3)]
        _compare(Attention({16: SMALL}).partial, qkv, precision, 0, True, 0, None, 0.0, ids, ids, 0)


def _check_ring_backend(precision: Precision, device: str) -> None:
    q, k, v, g_out = (
        randn(1, 20, 2, 16, precision=precision, device=device, seed=i).detach() for i in range(4)
    )
    how = Setting(seq=1, scale=0.25, back=8, forth=0, shift=4)
    ours, theirs = RingAttention({16: SMALL}).backend(q, k, v), PLAIN
    assert ours is not theirs
    out, lse = theirs.forward(q, k, v, None, None, how, dtype=torch.float32)
    results: list[tuple[Tensor, ...]] = [
        ours.forward(q, k, v, None, None, how, dtype=torch.float32),
        (out, lse),
    ]
    for each in (ours, theirs):
        results.append(
            each.backward((q, k, v, None, None, out, lse), g_out, how, dtype=torch.float32)
        )
    for one, other in (results[:2], results[2:]):
        for actual, expected in zip(one, other, strict=True):
            assert actual.dtype == expected.dtype == torch.float32
            check_equal(actual.to(precision.dtype), expected.double().cpu(), precision)


def case_calls_of_a_ring_give_float32(device: str) -> None:
    """By the kernels as by plain torch, whatever the element type of queries, keys and values."""
    for precision in PRECISIONS[device]:
        _check_ring_backend(precision, device)


def examples(device: str, dtype: torch.dtype) -> None:
    """Every kernel: in float32 as programs have them, else with small blocks; `BLOCKS` has a
    test of its own.
    """
    small = Blocks(*(Block(32, 32, warps=4, stages=2) for _ in range(3)))
    call(Attention(FLOAT32 if dtype == torch.float32 else {64: small}), 64, device, dtype)


def call(attention: Attention, dim: int, device: str, dtype: torch.dtype, **options: Any) -> None:
    """Forward and backward of 32 heads, 8 of keys and values, over 4096 tokens."""
    q = torch.empty(4096, 1, 32, dim, device=device, dtype=dtype, requires_grad=True)
    k, v = (
        torch.empty(4096, 1, 8, dim, device=device, dtype=dtype, requires_grad=True)
        for _ in range(2)
    )
    ids = (
        torch.empty(4096, 1, device=device, dtype=torch.int64)
        if options.pop("documents", False)
        else None
    )
    out, _ = attention.partial(q, k, v, 0, q_documents=ids, k_documents=ids, **options)
    out.backward(torch.empty_like(out))
