"""A router's choice, gates and losses against textbook formulas, in float64."""

from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from helpers.forked_ranks import run_ranks
from helpers.hf_models import Wide
from scalec.runtime import (
    Mesh,
    Positions,
    add_choices,
    add_load,
    all_reduce_,
    aux_loss,
    balance,
    limit_capacity,
    no_choices,
    no_load,
    no_loss,
    no_scores,
    router_z,
    sum_scores,
    top_k,
)

CHOICES: list[dict[str, Any]] = [
    {"k": 1},
    {"k": 8, "normalise": True},
    {"k": 3, "normalise": True, "scale": 2.5},
    {"k": 2, "scale": 0.5, "bias": True},
    {"k": 4, "groups": 4, "from_groups": 2, "bias": True, "normalise": True},
    {"k": 2, "groups": 8, "from_groups": 3},
    {"k": 1, "groups": 2, "from_groups": 1},
]
EXPERTS = 8


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _scores(logits: Tensor, score: str) -> Tensor:
    return (
        logits.sigmoid()
        if score == "sigmoid"
        else logits.exp() / logits.exp().sum(-1, keepdim=True)
    )


def _first(values: list[float], k: int) -> list[int]:
    """The indices of the k largest, of equal ones the lower."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def _chosen(scores: list[float], k: int, groups: int, from_groups: int) -> list[int]:
    each = len(scores) // groups
    two = [sum(sorted(scores[first : first + each])[-2:]) for first in range(0, len(scores), each)]
    open_groups = _first(two, from_groups)
    return _first(
        [it if i // each in open_groups else -torch.inf for i, it in enumerate(scores)], k
    )


def _textbook(
    logits: Tensor,
    k: int,
    score: str,
    normalise: bool = False,
    scale: float = 1.0,
    bias: Tensor | None = None,
    groups: int = 1,
    from_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    scores = _scores(logits, score)
    biased = (scores if bias is None else scores + bias).reshape(-1, EXPERTS).tolist()
    ids = torch.tensor([_chosen(token, k, groups, from_groups) for token in biased]).view(
        *logits.shape[:-1], k
    )
    gates = scores.gather(-1, ids)
    return scale * (gates / gates.sum(-1, keepdim=True) if normalise else gates), ids


@pytest.mark.parametrize(("score", "how"), [*product(("softmax", "sigmoid"), CHOICES)], ids=str)
def test_gates_ids_and_gradients(score: Any, how: dict[str, Any]) -> None:
    options: dict[str, Any] = how | ({"bias": _draw(EXPERTS, seed=1)} if how.get("bias") else {})
    for number, shape in enumerate(((2, 5), (7,), (1,), (2, 3, 2))):
        logits = (3 * _draw(*shape, EXPERTS, seed=number)).requires_grad_()
        (gates, ids), (want, choices) = (
            top_k(logits, score=score, **options),
            _textbook(logits, score=score, **options),
        )
        assert torch.equal(ids, choices)
        assert (ids.dtype, gates.dtype) == (torch.int64, torch.float64)
        torch.testing.assert_close(gates, want, atol=1e-14, rtol=1e-12)
        slope = _draw(*gates.shape, seed=9)
        (one,), (other,) = (torch.autograd.grad(it, [logits], slope) for it in (gates, want))
        torch.testing.assert_close(one, other, atol=1e-14, rtol=1e-12)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_equal_logits_choose_the_lower_index(score: Any) -> None:
    assert top_k(torch.zeros(2, 300), 3, score)[1].tolist() == [[0, 1, 2]] * 2
    bias = torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert top_k(torch.zeros(1, 4), 3, score, bias=bias)[1].tolist() == [[1, 3, 0]]
    assert top_k(torch.zeros(1, 8), 2, score, groups=4, from_groups=2)[1].tolist() == [[0, 1]]
    assert top_k(torch.tensor([[200.0, 100.0, 199.0]]), 2, score)[1].tolist() == [[0, 2]], (
        "scores are rounded"
    )


def test_gates_are_in_float32_at_least() -> None:
    logits = (3 * _draw(64, EXPERTS)).bfloat16()
    (gates, ids), (want, choices) = (
        top_k(it, 3, "sigmoid", normalise=True) for it in (logits, logits.double())
    )
    assert gates.dtype == torch.float32
    assert torch.equal(ids, choices)
    torch.testing.assert_close(gates.double(), want, atol=1e-7, rtol=1e-6)


def test_a_loss_of_no_router_is_handed_on_as_any() -> None:
    """A stage without routers has an edge for its gradient."""
    torch.autograd.backward(get_gradient_edge(no_loss(torch.ones(2))), torch.ones(()))
    with torch.no_grad():
        assert not no_loss(torch.ones(2)).requires_grad


def test_small_scores_are_divided_by_their_sum() -> None:
    for score in ("softmax", "sigmoid"):
        gates, _ = top_k(torch.tensor([[-300.0, -301.0, -1000.0]]), 2, score, normalise=True)
        torch.testing.assert_close(
            gates, torch.tensor([[1.0, -1.0]]).softmax(-1).new_tensor([[0.7310586, 0.2689414]])
        )


@pytest.mark.parametrize(("score", "seq"), [*product(("softmax", "sigmoid"), (0, 1))])
def test_balance_is_the_sum_of_fractions_times_scores(score: Any, seq: int) -> None:
    logits = _draw(4, 6, EXPERTS).requires_grad_()
    ids = _draw(4, 6, EXPERTS, seed=1).argsort(-1)[..., :3]
    ids[0, 0, 0] = -1
    length = logits.shape[seq]
    counts = torch.stack([(ids == e).any(-1).sum(seq) for e in range(EXPERTS)], -1).double()
    p = _scores(logits, score)
    p = (p / p.sum(-1, keepdim=True)).mean(seq)
    want = 0.25 * (counts * (EXPERTS / (3 * length)) * p).sum()
    got = balance(logits, ids, by=0.25, score=score, seq=seq)
    torch.testing.assert_close(got, want)
    (one,), (other,) = (torch.autograd.grad(3 * it, [logits]) for it in (got, want))
    torch.testing.assert_close(one, other, atol=1e-14, rtol=1e-12)


@pytest.mark.parametrize(("score", "seq"), [*product(("softmax", "sigmoid"), (0, 1))])
def test_scores_and_choices_are_summed_by_sequence(score: Any, seq: int) -> None:
    logits = _draw(4, 6, EXPERTS).requires_grad_()
    ids = _draw(4, 6, EXPERTS, seed=1).argsort(-1)[..., :3]
    p = _scores(logits, score)
    got, want = sum_scores(logits, score, seq), (p / p.sum(-1, keepdim=True)).sum(seq)
    torch.testing.assert_close(got, want)
    (one,), (other,) = (torch.autograd.grad(it.square().sum(), [logits]) for it in (got, want))
    torch.testing.assert_close(one, other, atol=1e-14, rtol=1e-12)
    tokens = torch.zeros(4, 6, dtype=torch.int64)
    counts = torch.stack([(ids == e).any(-1).sum(seq) for e in range(EXPERTS)], -1)
    none = no_choices(tokens, EXPERTS, batch=1 - seq)
    assert torch.equal(add_choices(add_choices(none, ids, seq), ids, seq), 2 * counts)
    assert no_scores(tokens, EXPERTS, batch=1 - seq).dtype == torch.float32
    assert no_scores(tokens, EXPERTS, batch=1 - seq, double=True).dtype == torch.float64
    assert no_scores(tokens, EXPERTS, batch=1 - seq).shape == none.shape == counts.shape


def _of_transformers(layers: list[Tensor], rows: Tensor) -> Tensor:
    """The loss of a forward of some rows."""
    logits: Any = tuple(each[rows].flatten(0, 1) for each in layers)
    loss: Any = load_balancing_loss_func(logits, EXPERTS, 2)
    return loss


@pytest.mark.parametrize("sequences", [1, 2, 4])
def test_the_auxiliary_loss_is_that_of_transformers(sequences: int) -> None:
    """The mean over forwards of so many sequences of its function, which is given the logits of
    all layers.
    """
    layers = [_draw(4, 6, EXPERTS, seed=seed).requires_grad_() for seed in range(3)]
    tokens = torch.zeros(4, 6, dtype=torch.int64)
    scores, choices = no_scores(tokens, EXPERTS, double=True), no_choices(tokens, EXPERTS)
    for logits in layers:
        _, ids = top_k(logits, 2)
        scores, choices = scores + sum_scores(logits), add_choices(choices, ids)
    groups = 4 // sequences
    got = aux_loss(scores, choices, by=0.25 / groups, rows=3 * 6 * sequences, sequences=sequences)
    with Wide():
        forwards = [_of_transformers(layers, rows) for rows in torch.arange(4).split(sequences)]
    want = 0.25 * torch.stack(forwards).mean()
    torch.testing.assert_close(got, want, atol=0, rtol=1e-12)
    pairs = zip(*(torch.autograd.grad(it, layers) for it in (got, want)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, atol=1e-16, rtol=1e-12)


def test_router_z() -> None:
    logits = _draw(2, 3, 5).requires_grad_()
    got, want = router_z(logits, by=0.5), 0.5 * (logits.exp().sum(-1).log() ** 2).sum()
    torch.testing.assert_close(got, want)
    (one,), (other,) = (torch.autograd.grad(it, [logits]) for it in (got, want))
    torch.testing.assert_close(one, other)
    assert router_z(logits.bfloat16(), by=1.0).dtype == torch.float32


def _limited(ids: Tensor, capacity: int) -> Tensor:
    """ids [b, s, k], one after another."""
    left = ids.clone()
    for sequence in left:
        taken = dict.fromkeys(range(EXPERTS), 0)
        for token in sequence:
            for choice, expert in enumerate(token.tolist()):
                taken[expert] += 1
                if taken[expert] > capacity:
                    token[choice] = -1
    return left


def test_the_first_tokens_of_each_sequence_keep_their_experts() -> None:
    ids = top_k(_draw(3, 12, EXPERTS), 3)[1]
    for capacity in (1, 3, 4, 6, 12):
        want = _limited(ids, capacity)
        assert (capacity == 12) == torch.equal(want, ids)
        assert torch.equal(limit_capacity(ids, EXPERTS, capacity), want)
        by_seq = limit_capacity(ids.transpose(0, 1), EXPERTS, capacity, seq=0)
        assert torch.equal(by_seq, want.transpose(0, 1))


SHARDED: list[tuple[dict[str, int], tuple[str, ...], tuple[str, ...]]] = [
    ({"cp": 2}, ("cp",), ()),
    ({"cp": 3}, ("cp",), ("cp",)),
    ({"cp": 2, "tp": 2}, ("cp", "tp"), ("cp",)),
    ({"tp": 2, "cp": 2}, ("cp", "tp"), ("cp", "tp")),
    ({"dp": 2, "cp": 2}, ("cp",), ("cp",)),
]


def _over_ranks(axes: dict[str, int], seq_axes: tuple[str, ...], zigzag: tuple[str, ...]) -> None:
    mesh, length = Mesh(axes), 24
    over, positions = mesh.axis(*seq_axes), Positions(mesh, length, *seq_axes, zigzag=zigzag)
    held = positions.indices(torch.device("cpu"))
    logits = _draw(2, length, EXPERTS).requires_grad_()
    ids = top_k(logits, 3)[1]
    for capacity in (2, 5, 9):
        mine = limit_capacity(ids[:, held], EXPERTS, capacity, positions=positions, over=over)
        assert torch.equal(mine, _limited(ids, capacity)[:, held])
    mine = logits.detach()[:, held].requires_grad_()
    part, whole = balance(mine, ids[:, held], by=0.5, over=over), balance(logits, ids, by=0.5)
    total = all_reduce_(part.detach().clone(), over)
    torch.testing.assert_close(total, whole.detach())
    (one,), (other,) = torch.autograd.grad(part, [mine]), torch.autograd.grad(whole, [logits])
    torch.testing.assert_close(one, other[:, held], atol=1e-14, rtol=1e-12)


@pytest.mark.parametrize("case", SHARDED, ids=str)
def test_a_sequence_over_ranks_has_the_same_capacity_and_balance(case: Any) -> None:
    run_ranks(prod(case[0].values()), _over_ranks, *case)


@pytest.mark.parametrize("shape", [(3, EXPERTS), (3, 1, EXPERTS), (EXPERTS,)], ids=str)
def test_a_load_has_a_row_of_counts_for_each_layer(shape: tuple[int, ...]) -> None:
    layers = [
        torch.randint(-1, EXPERTS, (2, 5, 2), generator=torch.Generator().manual_seed(i))
        for i in range(3)
    ]
    layers = layers[: prod(shape[:-1])]
    load = no_load(layers[0], *shape)
    for ids in layers:
        # a token chooses an expert once
        ids[..., 1] = torch.where(ids[..., 1] == ids[..., 0], -1, ids[..., 1])
        load = add_load(load, ids)
    want = [[int((ids == expert).sum()) for expert in range(EXPERTS)] for ids in layers]
    assert load.dtype == torch.int64
    assert load.view(-1, EXPERTS).tolist() == want
