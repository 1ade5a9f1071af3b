"""Ring attention on gloo ranks against attention on the whole sequence in one process, in
float64.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers import bigram
from helpers.forked_ranks import plain_groups, run_ranks
from helpers.kernels.cases_attention import SMALL
from helpers.late_process_group import Link
from helpers.ranks_alone import axis_at
from scalec.runtime import Axis, Mesh, Positions, attention, recomputed, ring_attention
from scalec.runtime.comm.positions import chunks
from scalec.runtime.debug.record import Recorder
from scalec.runtime.kernels import Attention, RingAttention
from scalec.runtime.ops.ring_attention import PLAIN, Backend, calls, hops

DIM = 8
WINDOWS = (0, 1, 2, 3, 5, 8, 10, 13, 100)

# ---- which calls there are


def _parts(ranks: int, each: int, zigzag: bool) -> tuple[Any, ...]:
    return tuple(chunks(ranks * each, ((ranks, rank, zigzag),)) for rank in range(ranks))


def _rings() -> Iterator[tuple[int, int, bool, bool, int]]:
    """Ranks, positions of each, zigzag, causal, window."""
    for ranks, zigzag, causal, window in product(
        range(1, 6), (False, True), (False, True), WINDOWS
    ):
        yield ranks, 4, zigzag, causal, window if window < 4 * ranks else 0


def _seen(causal: bool, window: int, far: Tensor) -> Tensor:
    seen = far >= 0 if causal else torch.ones_like(far, dtype=torch.bool)
    return seen & (far.abs() < window) if window else seen


def test_calls_are_those_pairs_that_see_each_other() -> None:
    """Each pair in one call, which is told apart by `shift` alone; no call is without any pair."""
    for ranks, each, zigzag, causal, window in _rings():
        parts = _parts(ranks, each, zigzag)
        places = [
            torch.tensor([at for start, size in part for at in range(start, start + size)])
            for part in parts
        ]
        for own, theirs in product(range(ranks), repeat=2):
            found = torch.zeros(each, each, dtype=torch.int64)
            for call in calls(parts[own], parts[theirs], causal, window):
                (row, rows), (column, columns) = call.rows, call.columns
                far = torch.arange(rows).unsqueeze(1) + call.shift - torch.arange(columns)
                pairs = (
                    _seen(causal, window, far)
                    if call.masked
                    else torch.ones_like(far, dtype=torch.bool)
                )
                assert pairs.any()
                found[row : row + rows, column : column + columns] += pairs
            far = places[own].unsqueeze(1) - places[theirs]
            assert torch.equal(found, _seen(causal, window, far).long()), (
                ranks,
                zigzag,
                causal,
                window,
                own,
                theirs,
            )


def test_a_ring_ends_with_the_furthest_keys_that_any_rank_sees() -> None:
    for ranks, each, zigzag, causal, window in _rings():
        least = ranks - 1
        if window == 1:
            least = 0
        elif window and causal and not zigzag:
            least = min(least, -(-(window - 1) // each))
        assert hops(_parts(ranks, each, zigzag), causal, window) == least, (
            ranks,
            zigzag,
            causal,
            window,
        )


@pytest.mark.parametrize("ranks", range(2, 6))
def test_without_a_window_a_hop_is_one_call(ranks: int) -> None:
    parts = _parts(ranks, 8, True)
    for own, theirs in product(range(ranks), repeat=2):
        (call,) = calls(parts[own], parts[theirs], True, 0)
        sizes = {0: (8, 8), 1: (8, 4), -1: (4, 8)}[(own > theirs) - (own < theirs)]
        assert (call.rows[1], call.columns[1]) == sizes
        assert call.masked == (own == theirs)
        (call,) = calls(parts[own], parts[theirs], False, 0)
        assert (call.rows, call.columns, call.masked) == ((0, 8), (0, 8), False)


# ---- on ranks

OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"softcap": 1.5, "scale": 0.4},
    {"documents": True},
    {"documents": True, "causal": False, "batch": 3},
    {"documents": True, "window": 5, "softcap": 1.0},
    {"documents": "alone"},
    {"window": 6, "causal": False, "batch": 3},
    {"values": 5},
    {"values": 11, "documents": True, "softcap": 1.0},
    *({"window": window} for window in WINDOWS[1:]),
]


def _documents(kind: Any, size: int, batch: int, layout: str) -> Tensor | None:
    """Of some tokens, other ones in each sample, so that they end inside of chunks; `alone`,
    each token of its own.
    """
    if kind is None:
        return None
    each = [1 if kind == "alone" else 3 + 2 * row for row in range(batch)]
    ids = torch.stack([torch.arange(size).div(many, rounding_mode="floor") for many in each])
    return ids if layout == "bshd" else ids.T


def _check(
    ring: Callable[..., Tensor],
    axis: Axis,
    mesh: Mesh,
    number: int,
    zigzag: bool,
    given: dict[str, Any],
) -> None:
    """Layout, heads and strides of operands differ from case to case."""
    layout, apart, grouped = (("bshd", "sbhd")[number % 2], number % 3 == 0, number % 4 < 2)
    options = dict(given)
    seq, size, batch = layout.index("s"), 8 * axis.size, options.pop("batch", 1)
    options |= {
        "documents": _documents(options.get("documents"), size, batch, layout),
        "layout": layout,
    }
    heads = (4, 2, 2) if grouped else (2, 2, 2)
    widths = (DIM, DIM, options.pop("values", DIM))
    draw = torch.Generator().manual_seed(number)
    sides = [(batch, size, *pair) for pair in zip(heads, widths, strict=True)]
    whole = [torch.randn(side, dtype=torch.float64, generator=draw) for side in sides]
    whole = [(it if seq else it.transpose(0, 1)).requires_grad_() for it in whole]
    held = Positions(mesh, size, "cp", zigzag=["cp"] if zigzag else []).indices(torch.device("cpu"))
    mine = [it.detach().index_select(seq, held) for it in whole]
    mine = [(torch.stack([it, it], -1)[..., 0] if apart else it).requires_grad_() for it in mine]
    expected = cast(Any, attention)(*whole, **options)
    slope = torch.randn(
        expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9)
    )
    actual = ring(*mine, axis, **options, zigzag=zigzag)
    torch.testing.assert_close(actual, expected.index_select(seq, held), atol=1e-12, rtol=1e-12)
    found = torch.autograd.grad(actual, mine, slope.index_select(seq, held))
    for one, other in zip(found, torch.autograd.grad(expected, whole, slope), strict=True):
        torch.testing.assert_close(one, other.index_select(seq, held), atol=1e-12, rtol=1e-12)


def _again(*args: Any, **options: Any) -> Tensor:
    return recomputed(ring_attention, *args, **options)


def _check_all() -> None:
    """On three ranks by a group that is late, which finds what is waited for too late or
    written too early.
    """
    mesh = Mesh({"cp": dist.get_world_size()})
    axis = Link().late(mesh.axis("cp")) if mesh.size("cp") == 3 else mesh.axis("cp")
    rings = (ring_attention, RingAttention({DIM: SMALL}), _again)
    for number, (given, zigzag) in enumerate(product(OPTIONS, (False, True))):
        try:
            _check(rings[number // 2 % 3], axis, mesh, number, zigzag, given)
        except AssertionError as error:
            raise AssertionError(f"{given}, zigzag {zigzag}, case {number}: {error}") from error


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_ring_is_attention_on_the_whole(world: int) -> None:
    with plain_groups() if world == 4 else nullcontext():  # the checks of others' groups take time
        run_ranks(world, _check_all)


def test_on_one_rank_it_is_attention() -> None:
    q, k, v = (torch.randn(2, 6, 2, DIM, dtype=torch.float64) for _ in range(3))
    for ring, plain in ((ring_attention, attention), (RingAttention({}), Attention({}))):
        assert torch.equal(
            ring(q, k, v, axis_at(0, 1), window=3, zigzag=True), plain(q, k, v, window=3)
        )


# ---- what it sends


def _sent(folder: Path, case: dict[str, Any], dtype: torch.dtype) -> list[list[tuple[Any, ...]]]:
    """Forward's and backward's calls on this rank: (elements, dtype, to which rank, from which)."""
    axis = Mesh({"cp": dist.get_world_size()}).axis("cp")
    q, k, v = (
        torch.randn(1, 4, heads, DIM, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)
    )
    found: list[list[tuple[Any, ...]]] = []
    results: list[Tensor] = []

    def forward() -> None:
        results.append(ring_attention(q, k, v, axis, **case))

    for step in (forward, lambda: results[0].sum().backward()):
        with Recorder(folder, bigram.PLAN, 0) as recorder:
            recorder.of("train", step)()
        lines = [
            json.loads(it) for it in (folder / f"rank{axis.rank:05}.jsonl").read_text().splitlines()
        ]
        calls = [line for line in lines if line.get("op")]
        assert {line["op"] for line in calls} <= {"all_to_all"}
        for line in calls:
            assert (
                line["shape"]
                == [sum(part) for part in line["splits"]][:1]
                == [max(line["splits"][1])]
            )
        ends = [[part.index(max(part)) for part in line["splits"]] for line in calls]
        found.append(
            [(*line["shape"], line["dtype"], *end) for line, end in zip(calls, ends, strict=True)]
        )
    return found


def _sent_all(folder: Path) -> list[Any]:
    cases = (
        {},
        {"zigzag": True},
        {"causal": False},
        {"window": 6},
        {"window": 3, "causal": False},
        {"window": 1},
    )
    return [_sent(folder, case, torch.bfloat16) for case in cases] + [
        _sent(folder, {}, torch.float64)
    ]


def test_calls_are_those_that_the_module_says(tmp_path: Path) -> None:
    size = 2 * 4 * 2 * DIM
    for rank, found in enumerate(run_ranks(4, _sent_all, tmp_path)):

        def by(step: int, dtype: str) -> tuple[int, str, int, int]:
            return size, dtype, (rank + step) % 4, (rank - step) % 4  # noqa: B023

        for (ahead, back), last in zip(found, (3, 3, 3, 2, 3, 0, 3), strict=True):
            kept, sums = ("float64", "float64") if back is found[-1][1] else ("bfloat16", "float32")
            assert ahead == [by(1, kept)] * last
            assert back == [by(1, kept), by(1, sums)] * last + [by(-last, sums)] * (last > 0)


def _events() -> list[str]:
    """Begins and waits of rotations, and computations, in order: forward and then backward."""
    link = Link()
    axis = link.late(Mesh({"cp": 3}).axis("cp"))

    def seen(function: Callable[..., Any]) -> Callable[..., Any]:
        def computing(*args: Any, **options: Any) -> Any:
            link.events.append(("compute", "", -1))
            return function(*args, **options)

        return computing

    q, k, v = (torch.randn(1, 4, 2, DIM, requires_grad=True) for _ in range(3))
    backend = Backend(*map(seen, PLAIN))
    ring_attention(q, k, v, axis, softcap=9.0, zigzag=True, backend=backend).sum().backward()
    return [kind if number < 0 else f"{kind} {number}" for kind, _, number in link.events]


def test_rotations_are_under_way_while_ranks_compute() -> None:
    forward = "begin 0, compute, wait 0, begin 1, compute, wait 1, compute"
    backward = (
        "begin 2, compute, begin 3, wait 2, begin 4, compute, wait 3, begin 5, wait 4,"
        " compute, wait 5, begin 6, wait 6"
    )
    for events in run_ranks(3, _events):
        assert ", ".join(events) == f"{forward}, {backward}"


def _in(dtype: torch.dtype, axis: Axis) -> list[Tensor]:
    """The result and v's gradient, of operands that bfloat16 has exactly, rounded to it."""
    draw = torch.Generator().manual_seed(axis.rank)
    q, k, v = (
        torch.randn(1, 16, 2, DIM, generator=draw).bfloat16().to(dtype).requires_grad_()
        for _ in range(3)
    )
    out = ring_attention(q, k, v, axis, zigzag=True)
    return [it.bfloat16() for it in (out, *torch.autograd.grad(out, [v], torch.ones_like(out)))]


def _rounded() -> None:
    axis = Mesh({"cp": 4}).axis("cp")
    for one, other in zip(_in(torch.bfloat16, axis), _in(torch.float32, axis), strict=True):
        assert torch.equal(one, other)


def test_hops_round_nothing() -> None:
    """Results and gradients in bfloat16 are those in float32, rounded once."""
    run_ranks(4, _rounded)
