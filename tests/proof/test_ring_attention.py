"""The ring: hop by hop it is attention, which is what it means in a step.

Purpose: the lemma that the proof of a step takes for granted.  Scores are exponents: a weight is
w^s, a merge is a sum, and all is exact.  Which pairs are computed follows from the numbers of
chunks, never from positions.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from attrs import evolve

from helpers.small_plans import Plan
from scalec.compiler.ir import REPLICATED, Program, sharded
from scalec.compiler.ops import messages
from scalec.compiler.ops.ring_attention import hops
from scalec.compiler.proof.semantics import MEANINGS, pull_back
from scalec.compiler.proof.semantics.call import Call
from scalec.compiler.proof.simulated_mesh import SimulatedMesh
from scalec.compiler.proof.tensors import Array, Tensor
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan
from scalec.testing.float64 import Reals

PRIME, BASE, CHUNK = 2**31 - 1, 7, 3
"""Weights are powers of the base; a chunk has so many positions."""

LAYOUTS = (False, True)
WINDOWS = (0, 1, 2, 3, 4, 5, 7, 9, 12, 40)


def chunks(rank: int, ranks: int, zigzag: bool) -> list[int]:
    """The numbers of a rank's chunks."""
    return [rank, 2 * ranks - 1 - rank] if zigzag else [rank]


def seen(ahead: int, causal: bool, window: int) -> bool:
    """Whether a query so far ahead of a key sees it."""
    return (ahead >= 0 or not causal) and (not window or abs(ahead) < window)


def pairs(query: int, key: int, causal: bool, window: int) -> Iterator[tuple[int, int]]:
    """The places in two chunks that see each other, of chunks of these numbers; none where none
    can.
    """
    shift = (query - key) * CHUNK
    most, least = shift + CHUNK - 1, shift - CHUNK + 1
    if (causal and most < 0) or (window and (least > window - 1 or most < 1 - window)):
        return
    yield from (
        (i, j) for i, j in product(range(CHUNK), repeat=2) if seen(shift + i - j, causal, window)
    )


@pytest.mark.parametrize("ranks", range(1, 6))
@pytest.mark.parametrize("zigzag", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
def test_hops_are_attention(ranks: int, zigzag: bool, causal: bool) -> None:
    """Forward, and the gradients, which travel with their keys and end where these belong."""
    count = ranks * (2 if zigzag else 1)
    rng = np.random.default_rng(ranks)
    scores, values, grads = (
        rng.integers(0, 50, (count * CHUNK, width)) for width in (count * CHUNK, 1, 1)
    )
    weights = np.array([[pow(BASE, int(s), PRIME) for s in row] for row in scores], dtype=object)
    for window in WINDOWS:
        last = hops(ranks, count * CHUNK, window if window < count * CHUNK else 0, causal, zigzag)
        mask = [
            [seen(i - j, causal, window) for j in range(count * CHUNK)]
            for i in range(count * CHUNK)
        ]
        whole = np.where(mask, weights, 0)
        sums, total = np.zeros(len(scores), dtype=object), np.zeros(len(scores), dtype=object)
        travelling = [
            np.zeros(len(chunks(r, ranks, zigzag)) * CHUNK, dtype=object) for r in range(ranks)
        ]
        for hop in range(last + 1):
            for rank in range(ranks):
                own, theirs = (
                    chunks(rank, ranks, zigzag),
                    chunks((rank - hop) % ranks, ranks, zigzag),
                )
                for query, (at, key) in product(own, enumerate(theirs)):
                    for i, j in pairs(query, key, causal, window):
                        row, column = query * CHUNK + i, key * CHUNK + j
                        sums[row] += weights[row, column] * int(values[column, 0])
                        total[row] += weights[row, column]
                        travelling[rank][at * CHUNK + j] += weights[row, column] * int(
                            grads[row, 0]
                        )
            if hop < last:
                travelling = [travelling[rank - 1] for rank in range(ranks)]
        home = [travelling[(rank + last) % ranks] for rank in range(ranks)]
        assert [*(sums % PRIME)] == [*(whole @ values[:, 0].astype(object) % PRIME)]
        assert [*(total % PRIME)] == [*(whole.sum(1) % PRIME)]
        expected = whole.T @ grads[:, 0].astype(object) % PRIME
        for rank, found in enumerate(home):
            places = [
                chunk * CHUNK + j for chunk in chunks(rank, ranks, zigzag) for j in range(CHUNK)
            ]
            assert [*(found % PRIME)] == [*expected[places]], (window, rank)


def test_a_hop_less_would_not_do() -> None:
    """The number of hops is the least that brings each query the keys that it sees."""
    for ranks, zigzag, causal, window in product(range(2, 6), LAYOUTS, (True, False), WINDOWS):
        count = ranks * (2 if zigzag else 1)
        window = window if window < count * CHUNK else 0
        needed = max(
            (rank - source) % ranks
            for rank, source in product(range(ranks), repeat=2)
            for query, key in product(chunks(rank, ranks, zigzag), chunks(source, ranks, zigzag))
            if [*pairs(query, key, causal, window)]
        )
        assert hops(ranks, count * CHUNK, window, causal, zigzag) == needed, (
            ranks,
            zigzag,
            causal,
            window,
        )


# ---- in the proof


def program(layout: str, mask: str) -> Program:
    plan = Plan(
        mesh="dp = 2  cp = 4", shard=f"batch over dp  seq over cp{layout} via ring", ranks=2, seq=16
    )
    plan = evolve(plan, word="bidirectional" if mask == "full" else "")
    return compile_plan(Source("plan.scale", plan.text().replace("mask=causal", f"mask={mask}")))


@pytest.mark.parametrize("mask", ["causal", "full", "causal, window=5"])
@pytest.mark.parametrize("layout", ["", " as zigzag"])
def test_it_means_attention_to_all_keys(layout: str, mask: str) -> None:
    it = program(layout, mask)
    op = next(op for op in it.ops if op.kind == "ring_attention")
    world, numbers, rng = (
        SimulatedMesh.of_program(it),
        Reals(len(it.axes)),
        np.random.default_rng(0),
    )
    types = it.operands(op)
    drawn = [rng.normal(size=(1, 1, 1, *(it.size(dim) for dim in type.dims))) for type in types]
    placed = [
        world.spread(Tensor(type.dims, x), type) for type, x in zip(types, drawn, strict=True)
    ]
    ring = Call(it, world, numbers, op, placed, types)
    whole = tuple(
        evolve(type, places=tuple(p for p in type.places if p[0] != "cp")) for type in types
    )
    alone = evolve(op, kind="attention", attrs=tuple((k, v) for k, v in op.attrs if k != "ring"))
    gathered = [world.coerce(x, ("cp",), sharded("seq"), REPLICATED, numbers) for x in placed]
    attention = Call(it, world, numbers, alone, gathered, whole)
    (found,), (expected,) = (
        MEANINGS["ring_attention"].value(ring),
        MEANINGS["attention"].value(attention),
    )
    _assert_parts(world, numbers, found, expected)
    grad = Tensor(found.dims, rng.normal(size=found.array.shape))
    every = world.coerce(grad, ("cp",), sharded("seq"), REPLICATED, numbers)
    wrt = range(len(types))
    _, parts = pull_back(MEANINGS["ring_attention"], ring, [grad], wrt)
    _, wholes = pull_back(MEANINGS["attention"], attention, [every], wrt)
    for part, full in zip(parts, wholes, strict=True):
        assert part
        assert full
        _assert_parts(world, numbers, part, full)


def _assert_parts(world: SimulatedMesh, numbers: Reals, part: Tensor, whole: Tensor) -> None:
    found: Array = world.coerce(part, ("cp",), sharded("seq"), REPLICATED, numbers).array
    np.testing.assert_allclose(
        found, np.broadcast_to(whole.array, found.shape), rtol=1e-12, atol=1e-12
    )


def test_what_it_sends_is_hops() -> None:
    it = program(" as zigzag", "causal")
    op = next(op for op in it.ops if op.kind == "ring_attention")
    (sent,) = messages(it, op, it.types)
    assert (sent.op, sent.hops, sent.by, sent.axes) == ("rotate", 3, 1, ("cp",))
