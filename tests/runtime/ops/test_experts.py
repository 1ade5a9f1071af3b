"""A mixture of experts on gloo ranks against the dense formula y = Σₑ gₑ(x) · fₑ(x) in one
process, in float64.
"""

import json
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import silu

from helpers import bigram
from helpers.forked_ranks import run_ranks
from helpers.host_reads import host_reads
from helpers.kernels.saved_tensors import saved_by
from scalec.runtime import (
    Experts,
    Mesh,
    RunError,
    all_reduce_,
    all_to_all,
    combine,
    dispatch,
    exchange,
    exchange_back,
    exchange_counts,
    grouped_bias,
    grouped_linear,
    recomputed,
    sort_by_expert,
)
from scalec.runtime.comm.experts import Groups
from scalec.runtime.debug.record import Recorder
from scalec.runtime.debug.sanitize import Sanitizer
from scalec.runtime.ops import grouped_linear as module

Layout = tuple[dict[str, int], tuple[str, ...], tuple[str, ...]]
LAYOUTS: list[Layout] = [
    ({}, (), ()),
    ({"ep": 2}, ("ep",), ("ep",)),
    ({"tp": 2}, ("tp",), ()),
    ({"dp": 2}, (), ()),
    ({"ep": 3}, ("ep",), ("ep",)),
    ({"dp": 2, "ep": 2}, ("ep",), ("ep",)),
    ({"dp": 2, "cp": 2}, ("dp", "cp"), ("dp", "cp")),
    ({"dp": 2, "cp": 2}, ("cp", "dp"), ("dp", "cp")),
    ({"dp": 2, "tp": 2}, ("dp", "tp"), ("dp",)),
    ({"dp": 2, "tp": 2}, ("tp", "dp"), ("dp",)),
    ({"dp": 2, "tp": 2}, ("tp",), ()),
]
"""A mesh, the axes of experts, and those of them over which tokens are sharded, as they are
over dp, cp and ep.
"""
COPIES = ("tp",)
H, F = 5, 3


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _weights(count: int) -> list[Tensor]:
    """Of all experts: gate, up, bias of up, down."""
    shapes = ((count, F, H), (count, F, H), (count, F), (count, H, F))
    return [_draw(*shape, seed=10 + number) for number, shape in enumerate(shapes)]


def _dense(x: Tensor, gates: Tensor, ids: Tensor, weights: list[Tensor]) -> Tensor:
    """Every expert of every token, of which most weigh nothing."""
    gate, up, bias, down = weights
    each = torch.zeros((*ids.shape[:-1], len(gate) + 1), dtype=x.dtype).scatter(
        -1, ids % (len(gate) + 1), gates
    )
    inner = silu(torch.einsum("...h,efh->...ef", x, gate)) * (
        torch.einsum("...h,efh->...ef", x, up) + bias
    )
    return torch.einsum("...e,...ef,ehf->...h", each[..., :-1], inner, down)


def _experts(
    y: Tensor, held: Groups | None, gate: Tensor, up: Tensor, bias: Tensor, down: Tensor
) -> Tensor:
    inner = silu(grouped_linear(y, gate, held)) * grouped_bias(
        grouped_linear(y, up, held), bias, held
    )
    return grouped_linear(inner, down, held)


def _padded(
    x: Tensor, gates: Tensor, ids: Tensor, experts: Experts, exchanged: bool, *weights: Tensor
) -> Tensor:
    """Each expert has as many rows as there are tokens."""
    order, axis = sort_by_expert(ids, experts, padded=ids.shape[:-1].numel()), experts.axis
    if not exchanged:
        return combine(_experts(dispatch(x, order), None, *weights), gates, order)
    y = _experts(all_to_all(dispatch(x, order), axis, dim_from=1, dim_to=0), None, *weights)
    return combine(all_to_all(y, axis, dim_from=0, dim_to=1), gates, order)


def _route(
    x: Tensor, gates: Tensor, ids: Tensor, experts: Experts, exchanged: bool, *weights: Tensor
) -> Tensor:
    order = sort_by_expert(ids, experts)
    if not exchanged:
        return combine(_experts(dispatch(x, order), order, *weights), gates, order)
    held = exchange_counts(order)
    y = _experts(exchange(dispatch(x, order), held), held, *weights)
    return combine(exchange_back(y, held), gates, order)


def _mine(mesh: Mesh, axes: tuple[str, ...], count: int) -> slice:
    """Of all experts those that this rank has."""
    held = count // mesh.size(*axes)
    return slice(mesh.rank(*axes) * held, (mesh.rank(*axes) + 1) * held)


Case = tuple[tuple[int, ...], int, str]
CASES: list[Case] = [
    ((2, 4), 1, "any"),
    ((2, 4), 2, "any"),
    ((3, 2, 2), 5, "any"),
    ((6,), 12, "any"),
    ((1,), 1, "any"),
    ((1,), 3, "any"),
    ((4, 2), 1, "one"),
    ((4, 2), 3, "first"),
    ((4, 2), 2, "some"),
    ((4,), 2, "none"),
]
"""The shape of a rank's tokens, k, and what they choose: all one expert, the first, none in
places, none at all.
"""


def _ids(shape: tuple[int, ...], k: int, count: int, kind: str, seed: int) -> Tensor:
    scores = _draw(*shape, count, seed=seed)
    if kind == "one":
        scores[..., count - 1] = 100.0
    ids = scores.argsort(-1)[..., -k:]
    if kind == "first":
        ids = torch.arange(k).expand(*shape, k)
    if kind == "some":
        ids = ids.masked_fill(_draw(*shape, k, seed=seed + 1) > 0.3, -1)
    return torch.full_like(ids, -1) if kind == "none" else ids


def _check(layout: Layout, case: Case, again: bool, padded: bool) -> None:
    axes, over, tokens = layout
    shape, k, kind = case
    mesh, count = Mesh(axes), 12
    experts, data = (
        Experts(mesh, count, *over, tokens=tokens),
        [name for name in axes if name not in COPIES],
    )
    ranks, mine = mesh.size(*data), mesh.rank(*data)
    xs = [_draw(*shape, H, seed=20 + rank).requires_grad_() for rank in range(ranks)]
    gates = [_draw(*shape, k, seed=30 + rank).requires_grad_() for rank in range(ranks)]
    ids = [_ids(shape, k, count, kind, 40 + 2 * rank) for rank in range(ranks)]
    whole = [weight.requires_grad_() for weight in _weights(count)]
    dense = [_dense(*given, whole) for given in zip(xs, gates, ids, strict=True)]
    slopes = [_draw(*shape, H, seed=50 + rank) for rank in range(ranks)]
    expected = torch.autograd.grad(dense, [xs[mine], gates[mine], *whole], slopes)

    x, gate = (it.detach().clone().requires_grad_() for it in (xs[mine], gates[mine]))
    held = [weight.detach()[_mine(mesh, over, count)].clone().requires_grad_() for weight in whole]
    partial = mesh.axis(*(name for name in over if name in COPIES))
    route = _padded if padded else _route
    with host_reads() as reads:
        actual = recomputed(route, x, gate, ids[mine], experts, bool(tokens), *held, enabled=again)
        found = torch.autograd.grad(actual, [x, gate, *held], slopes[mine])
    assert len(reads) == (not padded), f"the host waits for {reads}"
    for one, other in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(all_reduce_(one.clone(), partial), other, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(
        all_reduce_(actual.detach().clone(), partial), dense[mine], atol=1e-12, rtol=1e-12
    )
    left = mesh.axis(*(name for name in data if name not in over))
    for one, other in zip(found[2:], expected[2:], strict=True):
        whole_gradient = all_reduce_(one.contiguous(), left)
        torch.testing.assert_close(
            whole_gradient, other[_mine(mesh, over, count)], atol=1e-12, rtol=1e-12
        )


def _check_all(layout: Layout) -> None:
    for case, again, padded in product(CASES, (False, True), (False, True)):
        try:
            _check(layout, case, again, padded)
        except Exception as error:
            raise AssertionError(
                f"{layout}, {case}, again {again}, padded {padded}: {error}"
            ) from error


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_route_is_the_dense_formula(layout: Layout) -> None:
    ranks = prod(layout[0].values())
    _check_all(layout) if ranks == 1 else run_ranks(ranks, _check_all, layout)


def test_what_is_saved() -> None:
    """Rows that enter products, rows and gates that are combined, weights: nothing else that
    has gradients.
    """
    order = sort_by_expert(torch.tensor([[0, 1], [1, 2]]), Experts(Mesh({}), 3))
    x, gates, bias = (_draw(*shape).requires_grad_() for shape in ((2, H), (2, 2), (3, F)))
    up, down = _draw(3, F, H).requires_grad_(), _draw(3, H, F).requires_grad_()
    made: list[Tensor] = []

    def route() -> Tensor:
        made.append(dispatch(x, order))
        made.append(grouped_bias(grouped_linear(made[0], up, order), bias, order))
        made.append(grouped_linear(made[1], down, order))
        return combine(made[2], gates, order)

    saved = saved_by(route)
    assert [it.data_ptr() for it in saved] == [
        it.data_ptr() for it in (made[0], up, made[1], down, made[2], gates)
    ]


def _by_torch(x: Tensor, weight: Tensor, ids: Tensor) -> list[Tensor]:
    order = sort_by_expert(ids, Experts(Mesh({}), len(weight)))
    out = grouped_linear(dispatch(x, order), weight, order)
    return [out, *torch.autograd.grad(out.sum(), [x, weight])]  # of which the gradient is expanded


def test_where_torch_has_products_of_groups_they_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With experts without rows, and rows that are no whole 16 bytes, which it does not take."""
    for width, served in ((16, True), (12, False)):
        calls: list[bool] = []

        def is_torchs(*operands: Tensor, calls: list[bool] = calls) -> bool:
            calls.append(all(map(module._is_aligned, operands)))
            return calls[-1]

        monkeypatch.setattr(module, "is_for_grouped_mm", is_torchs)
        x, weight = (
            _draw(6, width).bfloat16().requires_grad_(),
            _draw(5, 8, width, seed=1).bfloat16().requires_grad_(),
        )
        ids = torch.tensor([[1], [3], [3], [1], [1], [3]])
        found = _by_torch(x, weight, ids)
        assert calls == [served] * 3
        monkeypatch.undo()
        wanted = _by_torch(
            x.detach().double().requires_grad_(), weight.detach().double().requires_grad_(), ids
        )
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.double(), other, atol=0.1, rtol=0.02)
        assert not found[-1][[0, 2, 4]].any()


def _of_peers(tokens: int) -> tuple[list[list[int]], list[int], list[list[int]]]:
    """(source rank, token, expert) of the rows that this rank has, how many each expert got,
    and what came back.
    """
    mesh = Mesh({"ep": dist.get_world_size()})
    experts, rank = Experts(mesh, 6, "ep", tokens=("ep",)), mesh.rank("ep")
    ids = _ids((tokens,), 2, 6, "any", rank)
    x = torch.stack([torch.full((tokens,), rank), torch.arange(tokens)], -1).double()
    order = sort_by_expert(ids, experts)
    held = exchange_counts(order)
    rows = dispatch(x, order)
    came = exchange(rows, held)
    assert torch.equal(exchange_back(came, held), rows)
    assert rows.untyped_storage().nbytes() == rows.numel() * 8
    expert = torch.arange(experts.experts_per_rank).repeat_interleave(held.counts)
    return torch.cat([came.long(), expert.unsqueeze(-1)], -1).tolist(), held.sizes, ids.tolist()


def test_rows_lie_by_expert_then_source_then_token() -> None:
    found = run_ranks(3, _of_peers, 7)
    for rank, (rows, sizes, _) in enumerate(found):
        wanted = [
            [source, token, expert]
            for expert in range(2)
            for source, (*_, ids) in enumerate(found)
            for token, chosen in enumerate(ids)
            if 2 * rank + expert in chosen
        ]
        assert rows == wanted
        assert sizes == [sum(row[-1] == expert for row in wanted) for expert in range(2)]


def _recorded(folder: Path) -> tuple[list[Any], list[Any]]:
    """Calls of a route's forward and of its backward on this rank: shape, dtype, splits."""
    mesh = Mesh({"dp": 2, "cp": 2})
    experts = Experts(mesh, 4, "dp", "cp", tokens=("dp", "cp"))
    x, rank = _draw(3, H).requires_grad_(), mesh.rank("dp", "cp")
    gates, ids = torch.ones(3, 1, dtype=torch.float64), torch.tensor([[0], [rank], [3]])
    weights = [weight[:1].requires_grad_() for weight in _weights(1)]
    results: list[Tensor] = []
    found: list[list[Any]] = []
    for step in (
        lambda: results.append(recomputed(_route, x, gates, ids, experts, True, *weights)),
        lambda: results[0].sum().backward(),
    ):
        with Recorder(folder, bigram.PLAN, 0) as recorder:
            recorder.of("train", step)()
        lines = [
            json.loads(line) for line in (folder / f"rank{rank:05}.jsonl").read_text().splitlines()
        ]
        calls = [line for line in lines if line.get("op")]
        assert all((line["op"], line["group"]) == ("all_to_all", [0, 1, 2, 3]) for line in calls)
        found.append([(line["shape"], line["dtype"], line.get("splits")) for line in calls])
    return found[0], found[1]


def test_calls_are_recorded_with_their_splits(tmp_path: Path) -> None:
    """Backward exchanges what it recomputes, but no counts: gates' gradients need the rows that
    came back.
    """
    for rank, (forward, backward) in enumerate(run_ranks(4, _recorded, tmp_path)):
        sent = [sum(expert == peer for expert in (0, rank, 3)) for peer in range(4)]
        came = {0: [2, 1, 1, 1], 3: [1, 1, 1, 2]}.get(
            rank, [int(peer == rank) for peer in range(4)]
        )
        there = ([3, H], "float64", [sent, came])
        back = ([sum(came), H], "float64", [came, sent])
        assert forward == [([4], "int64", None), there, back]
        assert backward == [there, back, there, back]


def _counted_otherwise() -> str:
    mesh = Mesh({"ep": 3}, watch=Sanitizer(torch.device("cpu")))
    order = sort_by_expert(torch.tensor([[0], [1], [2]]), Experts(mesh, 3, "ep", tokens=("ep",)))
    held = exchange_counts(order)
    if mesh.rank("ep") == 1:
        held.received[2] += 1
    with pytest.raises(RunError) as error:
        exchange(dispatch(torch.ones(3, 2), order), held)
    return str(error.value)


def _chosen_otherwise() -> str:
    mesh = Mesh({"tp": 3}, watch=Sanitizer(torch.device("cpu")))
    with pytest.raises(RunError) as error:
        sort_by_expert(torch.tensor([[0], [mesh.rank("tp") // 2]]), Experts(mesh, 3, "tp"))
    return str(error.value)


def test_a_sanitized_run_ends_where_ranks_disagree() -> None:
    for found in run_ranks(3, _counted_otherwise):
        assert "rank 2 sends 1 rows to rank 1, which takes 2; at " in found
    for found in run_ranks(3, _chosen_otherwise):
        assert "is not the same over tp: rank 2 differs from the other 2" in found
