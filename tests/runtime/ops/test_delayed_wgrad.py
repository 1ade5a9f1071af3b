"""Weight gradients set apart: the same in two parts as in one, added where autograd adds them,
nothing kept behind.
"""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from scalec.runtime import (
    SGD,
    Axis,
    Bucket,
    Experts,
    Mesh,
    ParamGroup,
    TrainState,
    embedding,
    grouped_linear,
    normal,
    recomputed,
    sort_by_expert,
    split_embedding,
    split_linear,
    weight,
)
from scalec.runtime.ops.delayed_wgrad import Part, set_apart

TOKENS = torch.tensor([[3, 0, 3], [6, 1, 0]])


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Tied(nn.Module):
    """Rows of a table, a layer done again in backward if asked for, and the table once more as
    the head.
    """

    def __init__(self, again: bool = False, device: str = "cpu") -> None:
        super().__init__()
        self.table, self.inner = nn.Parameter(_randn(7, 4).to(device)), _Inner(device)
        self.norm, self.again = nn.Parameter(_randn(4, seed=2).to(device)), again
        self.flat = torch.zeros(
            sum(each.numel() for each in self.parameters()), dtype=torch.float64, device=device
        )
        pieces = self.flat.split([each.numel() for each in self.parameters()])
        for parameter, piece in zip(self.parameters(), pieces, strict=True):
            parameter.grad = piece.view_as(parameter)

    def forward(self, tokens: Tensor, splits: bool = True) -> Tensor:
        rows, linear = (split_embedding, split_linear) if splits else (embedding, F.linear)
        x = recomputed(self.inner, rows(tokens, self.table), linear, enabled=self.again)
        return torch.tanh(linear(x * self.norm, self.table)).square().sum()


class _Inner(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.w = nn.Parameter(_randn(4, 4, seed=1).to(device))

    def forward(self, x: Tensor, linear: Any) -> Tensor:
        return x + torch.tanh(linear(torch.tanh(linear(x, self.w)), self.w))


def _reference(tokens: Tensor = TOKENS) -> Tensor:
    model = Tied()
    model(tokens, splits=False).backward()
    return model.flat


@pytest.mark.parametrize("again", [False, True])
def test_elsewhere_they_are_torchs_own(again: bool) -> None:
    model = Tied(again)
    loss = model(TOKENS)
    assert torch.equal(loss, model(TOKENS, splits=False))
    loss.backward()
    torch.testing.assert_close(model.flat, _reference(), rtol=1e-13, atol=1e-13)


def _in_parts(model: Tied, tokens: Tensor) -> None:
    """Two microbatches, the weight parts of both behind the input parts of both."""
    parts: list[list[Part]] = [[], []]
    for own, half in zip(parts, tokens.split(1), strict=True):
        loss = model(half)
        with set_apart(own):
            loss.backward()
    assert [len(own) for own in parts] == [4, 4]  # a table twice, a weight twice
    assert model.norm.grad is not None
    assert model.norm.grad.any()
    assert not model.flat[: model.table.numel()].any()
    for part in [*parts[0], *parts[1]]:
        part()


@pytest.mark.parametrize("again", [False, True])
def test_two_parts_make_what_one_makes(again: bool) -> None:
    model = Tied(again)
    _in_parts(model, TOKENS)
    torch.testing.assert_close(model.flat, _reference(), rtol=1e-13, atol=1e-13)


@pytest.mark.gpu
def test_on_a_gpu_where_backward_has_a_thread_of_its_own() -> None:
    model = Tied(again=True, device="cuda")
    _in_parts(model, TOKENS.cuda())
    torch.testing.assert_close(model.flat.cpu(), _reference(), rtol=1e-12, atol=1e-12)


def test_gradients_of_inputs_do_not_wait() -> None:
    x, w = _randn(2, 3, 4).requires_grad_(), nn.Parameter(_randn(5, 4))
    parts: list[Part] = []
    with set_apart(parts):
        split_linear(x, w).square().sum().backward()
    (of_x, of_w) = torch.autograd.grad(F.linear(x, w).square().sum(), (x, w))
    assert w.grad is None
    torch.testing.assert_close(x.grad, of_x, rtol=1e-13, atol=1e-13)
    (part,) = parts
    part()
    torch.testing.assert_close(w.grad, of_w, rtol=1e-13, atol=1e-13)


def test_of_a_weight_that_is_made_of_a_parameter_nothing_is_set_apart() -> None:
    x, w = _randn(3, 4), nn.Parameter(_randn(5, 4))
    parts: list[Part] = []
    with set_apart(parts):
        split_linear(x, 2 * w).sum().backward()
        split_embedding(TOKENS % 5, 2 * w).sum().backward()
    assert parts == []
    (expected,) = torch.autograd.grad(
        F.linear(x, 2 * w).sum() + F.embedding(TOKENS % 5, 2 * w).sum(), w
    )
    torch.testing.assert_close(w.grad, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_of_the_vocabulary(rank: int) -> None:
    axis, table = Axis("tp", 2, rank, None), nn.Parameter(_randn(4, 3))
    parts: list[Part] = []
    made = split_embedding(TOKENS, table, axis)
    expected = embedding(TOKENS, table, axis)
    assert torch.equal(made, expected)
    (gradient,) = torch.autograd.grad(expected.square().sum(), table)
    with set_apart(parts):
        made.square().sum().backward()
    for part in parts:
        part()
    torch.testing.assert_close(table.grad, gradient, rtol=1e-13, atol=1e-13)


def _wide_gradient(splits: bool) -> Tensor:
    """Of a model that computes in bfloat16, in float32."""
    mesh, model = Mesh({}), nn.Module()
    model.w = weight(mesh, 5, 4, init=normal(1.0))
    state = TrainState(
        model,
        mesh,
        {"all": Bucket(ParamGroup("w"))},
        SGD(),
        dtype=torch.bfloat16,
        master=torch.float32,
    )
    state.initialise(seed=1)
    for seed in range(2):
        x, parts = _randn(8, 4, seed=seed).bfloat16(), list[Part]()
        loss = (split_linear if splits else F.linear)(x, model.w).float().square().sum()
        with set_apart(parts):
            loss.backward()
        assert len(parts) == splits
        for part in parts:
            part()
    return state.gradients()["all"]


def test_gradients_that_are_wider_than_weights_are_added_where_they_are_kept() -> None:
    assert _wide_gradient(True).dtype == torch.float32
    assert torch.equal(_wide_gradient(True), _wide_gradient(False))


def test_an_input_is_kept_until_its_weight_part_is_done() -> None:
    x, w = _randn(3, 4), nn.Parameter(_randn(5, 4))
    memory, parts = StorageWeakRef(x.untyped_storage()), list[Part]()
    with set_apart(parts):
        split_linear(x, w).square().sum().backward()
    del x
    assert not memory.expired()
    parts.pop()()
    assert memory.expired()


def test_of_an_input_it_keeps_the_values_and_not_the_graph() -> None:
    """That leads to what has entered a stage, and to its gradient."""
    entered, w = _randn(3, 4).requires_grad_(), nn.Parameter(_randn(5, 4))
    alive, parts = weakref.ref(entered), list[Part]()
    with set_apart(parts):
        split_linear(entered.sin(), w).square().sum().backward()
    del entered
    assert parts
    assert alive() is None


def test_an_input_part_that_fails_leaves_nothing_behind() -> None:
    w = nn.Parameter(_randn(5, 4))
    with pytest.raises(ZeroDivisionError), set_apart([]):
        raise ZeroDivisionError
    split_linear(_randn(3, 4), w).sum().backward()
    assert w.grad is not None


def test_of_experts_too() -> None:
    x, w = _randn(3, 4).requires_grad_(), nn.Parameter(_randn(2, 5, 4))
    order, parts = sort_by_expert(torch.tensor([[0], [1], [1]]), Experts(Mesh({}), 2)), list[Part]()
    with set_apart(parts):
        grouped_linear(x, w, order).square().sum().backward()
    of_x, of_w = torch.autograd.grad(
        (F.linear(x[:1], w[0]).square().sum() + F.linear(x[1:], w[1]).square().sum()), (x, w)
    )
    assert w.grad is None
    torch.testing.assert_close(x.grad, of_x, rtol=1e-13, atol=1e-13)
    parts.pop()()
    torch.testing.assert_close(w.grad, of_w, rtol=1e-13, atol=1e-13)
