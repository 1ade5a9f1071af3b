"""Calls done again in backward: the same numbers, what is kept meanwhile, and how often they
are done.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import linear, silu

from helpers.forked_ranks import run_ranks
from scalec.runtime import (
    Axis,
    Experts,
    Mesh,
    all_reduce,
    combine,
    dispatch,
    recompute,
    recomputed,
    regather,
    sort_by_expert,
    top_k,
)

Kept = list[Tensor]


class Layer(nn.Module):
    """x + (silu(x wᵀ))² uᵀ, and then what saves nothing."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.w, self.u = (nn.Parameter(torch.randn(4, 4, generator=generator)) for _ in range(2))
        self.begun = self.ended = 0

    def forward(self, x: Tensor, nothing: None) -> Tensor:
        """One layer."""
        self.begun += 1
        h = silu(linear(x, self.w))
        x = x + linear(h * h, self.u)
        self.ended += 1
        return x


def get_saved_tensors(forward: Callable[[], Tensor]) -> tuple[Tensor, Kept]:
    """The result, and what is kept for backward."""
    kept: Kept = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        return forward(), kept


def _gradients(result: Tensor, *of: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad((result * result).sum(), of, retain_graph=True))


def _is(x: Tensor, *others: Tensor) -> bool:
    return x.untyped_storage().data_ptr() in {
        other.untyped_storage().data_ptr() for other in others
    }


def test_a_module_done_again_keeps_its_arguments_and_parameters_alone() -> None:
    layer, x = Layer(), torch.randn(3, 4, requires_grad=True)
    want = _gradients(layer(x, None), x, *layer.parameters())
    layer.begun = layer.ended = 0
    result, kept = get_saved_tensors(lambda: recomputed(layer, x, None))
    assert all(_is(each, x, *layer.parameters()) for each in kept)
    assert all(
        torch.equal(*pair)
        for pair in zip(_gradients(result, x, *layer.parameters()), want, strict=True)
    )
    assert (layer.begun, layer.ended) == (2, 1)  # up to the last tensor that it needs
    assert all(
        torch.equal(*pair)
        for pair in zip(_gradients(result, x, *layer.parameters()), want, strict=True)
    )
    assert layer.begun == 3  # a second backward does it once more


def test_without_gradients_nothing_is_noted() -> None:
    layer, x = Layer(), torch.randn(3, 4)
    with torch.no_grad(), recompute(silu, recomputed(layer, x, None)) as y:
        assert torch.equal(y, silu(layer(x, None)))


def test_a_result_is_not_kept_by_its_readers_in_the_block() -> None:
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def forward() -> Tensor:
        with recompute(torch.tanh, x) as y:
            z = linear(y, w) * y[:1]
        return z

    y = torch.tanh(x)
    want = _gradients(linear(y, w) * y[:1], x, w)
    result, kept = get_saved_tensors(forward)
    # a factor: what linear gives
    assert sum(each.shape == x.shape and not _is(each, x) for each in kept) == 1
    assert all(torch.equal(*pair) for pair in zip(_gradients(result, x, w), want, strict=True))


def test_a_block_in_a_block_reads_what_is_made_again() -> None:
    calls: list[str] = []

    def named(name: str, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: (calls.append(name), function(x))[1]

    x = torch.randn(3, 4, requires_grad=True)

    def forward() -> Tensor:
        with recompute(named("tanh", torch.tanh), x) as y, recompute(named("silu", silu), y) as z:
            return z * z

    want = _gradients(silu(torch.tanh(x)) ** 2, x)
    result, kept = get_saved_tensors(forward)
    assert calls == ["tanh", "silu"]
    assert all(_is(each, x) for each in kept)
    assert torch.allclose(_gradients(result, x)[0], want[0], rtol=1e-6)
    assert calls == ["tanh", "silu", "tanh", "silu"]


class Gathering(nn.Module):
    """Communicates before its last tensor and after it."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        self.sums = 0

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        y = torch.tanh(self._sum(x))
        return self._sum(y)

    def _sum(self, x: Tensor) -> Tensor:
        self.sums += 1
        return all_reduce(x, self.axis)


def _sums() -> int:
    """How often a layer communicates, forward and again."""
    layer = Gathering(Mesh({"tp": 2}).axis("tp"))
    recomputed(layer, torch.ones(2, requires_grad=True)).sum().backward()
    return layer.sums


def test_what_comes_after_the_last_tensor_is_not_communicated_again() -> None:
    assert run_ranks(2, _sums) == [3, 3]


def _gathered_around() -> bool:
    """Whether a block inside a gathered one keeps the gathered tensor, or its part."""
    axis = Mesh({"tp": 2}).axis("tp")
    x = torch.ones(2, 4, requires_grad=True)

    def forward() -> Tensor:
        with regather(x, axis, dim=0) as full, recompute(silu, full) as y:
            return (y * y).sum()

    result, kept = get_saved_tensors(forward)
    result.backward()
    want = (
        torch.autograd.grad((silu(v := torch.ones(2, 4, requires_grad=True)) ** 2).sum(), v)[0] * 2
    )
    return all(_is(each, x) for each in kept) and torch.allclose(
        x.grad if x.grad is not None else v, want
    )


def test_a_block_keeps_nothing_that_the_one_around_it_makes_again() -> None:
    assert run_ranks(2, _gathered_around) == [True, True]


class Routed(nn.Module):
    """Its router chooses otherwise each time, as rounding may where two logits are nearly equal."""

    def __init__(self, around: bool) -> None:
        super().__init__()
        self.experts, self.around, self.runs = Experts(Mesh({}), 4), around, 0
        self.chosen: list[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        """Of a layer; with `around` what is in it is recomputed by itself too."""
        y = recomputed(self.route, torch.tanh(x), enabled=self.around)
        return y * y

    def route(self, x: Tensor) -> Tensor:
        """The square of each token."""
        self.runs += 1
        gates, ids = top_k(x.roll(self.runs, -1), 1, normalise=True)
        order = sort_by_expert(ids, self.experts)
        self.chosen.append([*ids.flatten().tolist(), *order.choices.tolist()])
        rows = dispatch(x, order)
        return combine(rows * rows, gates, order)


def test_what_was_chosen_is_not_chosen_again() -> None:
    for around in (False, True):
        layer, x = (
            Routed(around),
            torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).requires_grad_(),
        )
        (got,) = _gradients(recomputed(layer, x), x)
        assert layer.runs == (3 if around else 2)
        assert layer.chosen[1:] == layer.chosen[:1] * (layer.runs - 1)
        torch.testing.assert_close(got, _gradients(torch.tanh(x) ** 4, x)[0])
        layer.route(x)
        assert layer.chosen[-1] != layer.chosen[0]
