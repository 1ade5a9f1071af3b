"""The torch twins of cross entropy in float64, on the CPU; what they save; weight gradients
that are put off.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from helpers.forked_ranks import run_ranks
from helpers.kernels.cases import Precision
from helpers.kernels.losses import LOSSES, PLAIN, Loss, check_loss, joined, labels_of, ranks
from scalec.runtime import (
    Axis,
    Mesh,
    all_reduce,
    local_softmax_stats,
    max_logit,
    replicate,
    token_loss,
)
from scalec.runtime.kernels import (
    CrossEntropy,
    LinearCrossEntropy,
    LinearSoftmaxStats,
    LogitSoftmaxStats,
    rescale_to_global_max,
)
from scalec.runtime.ops.delayed_wgrad import Part, set_apart

EXACT = Precision(torch.float64, 1e-12, 1e-12)


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).requires_grad_()


SHAPES = st.tuples(
    st.integers(1, 3), st.integers(1, 9), st.integers(1, 6), st.integers(0, 5), st.integers(1, 10)
)
"""Ranks, columns of each, classes that are padding (at most all but one), tokens, columns or
tokens of a chunk.
"""


def _with_bias(op: LinearSoftmaxStats | LinearCrossEntropy, *args: Any, **options: Any) -> Any:
    """Of x, weight and bias, if there is one, and all behind them."""
    x, weight, *rest = args
    bias = rest.pop(0) if rest[0].is_floating_point() else None
    return op(x, weight, *rest, **options, bias=bias)


@pytest.mark.long
@given(
    SHAPES,
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.0, 0.01]),
    st.sampled_from([0.0, 3.0]),
    st.booleans(),
)
def test_all_ways_have_the_loss_and_the_gradients_of_one(
    shape: tuple[int, ...], smoothing: float, z: float, cap: float, biased: bool
) -> None:
    world, columns, padding, tokens, chunk = shape
    whole = world * columns
    loss = Loss(max(1, whole - padding), smoothing, z, cap)
    labels = labels_of((tokens,), loss.classes or whole, "cpu")
    operands = [
        _randn(tokens, 4),
        _randn(whole, 4, seed=1),
        *([_randn(whole, seed=2)] if biased else []),
    ]
    parts, linear = LogitSoftmaxStats({}), LinearSoftmaxStats({}, chunk)

    def split(*operands: Tensor) -> Tensor:
        logits = F.linear(*operands).chunk(world, -1)
        return joined(
            lambda axis: parts(logits[axis.rank], labels, axis, **loss.of_parts),
            labels,
            columns,
            world,
            loss,
        )

    def split_linear(x: Tensor, *weights: Tensor) -> Tensor:
        own = [*zip(*(weight.chunk(world) for weight in weights), strict=True)]

        def of_rank(axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
            return _with_bias(linear, x, *own[axis.rank], labels, axis, **loss.of_parts)

        return joined(of_rank, labels, columns, world, loss)

    ways: list[Callable[..., Tensor]] = [
        split,
        split_linear,
        lambda *operands: CrossEntropy({})(F.linear(*operands), labels, **loss.of_whole),
        lambda *operands: _with_bias(
            LinearCrossEntropy({}, chunk), *operands, labels, **loss.of_whole
        ),
    ]
    for way in ways:
        check_loss(way, lambda *operands: loss.of(F.linear(*operands), labels), operands, EXACT)


def _vocabulary_parallel(loss: Loss) -> None:
    """Each rank with its rows of the weight, as an emitted program would write it."""
    axis = Mesh({"tp": torch.distributed.get_world_size()}).axis("tp")
    x, whole, labels = (
        _randn(5, 4),
        (_randn(6 * axis.size, 4, seed=1), _randn(6 * axis.size)),
        labels_of((5,), 11, "cpu"),
    )
    weight, bias = (
        it.detach().chunk(axis.size)[axis.rank].clone().requires_grad_() for it in whole
    )
    m, z, t = LinearSoftmaxStats({}, 4)(
        replicate(x, axis), weight, labels, axis, **loss.of_parts, bias=bias
    )
    peak = all_reduce(m, axis, op="max")
    z, t = rescale_to_global_max(
        m, z, t, peak, labels, axis, columns=6, classes=loss.classes, smoothing=loss.smoothing
    )
    actual = token_loss(
        all_reduce(z, axis), all_reduce(t, axis), labels, peak if loss.z else None, loss.z
    )
    dx, *of_weights = torch.autograd.grad(actual, (x, weight, bias))
    expected = loss.of(F.linear(x, *whole), labels)
    right, *rights = torch.autograd.grad(expected, (x, *whole))
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(dx, right, atol=1e-12, rtol=1e-12)
    for found, all_ in zip(of_weights, rights, strict=True):
        torch.testing.assert_close(found, all_.chunk(axis.size)[axis.rank], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("loss", [PLAIN, Loss(11, smoothing=0.1, z=0.01, cap=3.0)])
def test_a_product_on_two_ranks_with_their_collectives(loss: Loss) -> None:
    run_ranks(2, _vocabulary_parallel, loss)


@pytest.mark.parametrize("loss", [PLAIN, Loss(17, smoothing=0.1)])
def test_parts_in_terms_of_the_peak_are_those_of_local_softmax_stats(loss: Loss) -> None:
    """Of each rank, and the local maximum that of `max_logit`."""
    logits, labels = _randn(2, 5, 18).detach(), labels_of((2, 5), loss.classes or 18, "cpu")
    own, peak = logits.chunk(3, -1), logits[..., : loss.classes].amax(-1)
    for axis in ranks(3):
        m, z, t = LogitSoftmaxStats({})(own[axis.rank], labels, axis, **loss.of_parts)
        torch.testing.assert_close(m, max_logit(own[axis.rank], axis, loss.classes), atol=0, rtol=0)
        actual = rescale_to_global_max(
            m, z, t, peak, labels, axis, columns=6, classes=loss.classes, smoothing=loss.smoothing
        )
        expected = local_softmax_stats(
            own[axis.rank], peak, labels, axis, loss.classes, loss.smoothing
        )
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


def test_a_rank_without_classes_has_a_finite_maximum() -> None:
    m, z, t = LogitSoftmaxStats({})(
        _randn(3, 4), labels_of((3,), 4, "cpu"), ranks(2)[1], classes=4, smoothing=0.1
    )
    assert m.eq(torch.finfo(torch.float32).min).all()
    assert not z.any()
    assert not t.any()


def _saved(call: Callable[[], Any]) -> list[Tensor]:
    """What a call has autograd keep, each storage once."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return list(kept.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_saved_are_operands_and_the_maximum(dtype: torch.dtype) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    logits, labels = (
        _randn(2, 5, 18).detach().to(dtype).requires_grad_(),
        labels_of((2, 5), 18, "cpu"),
    )
    x, weight = (
        it.detach().to(dtype).requires_grad_() for it in (_randn(2, 5, 4), _randn(18, 4, seed=1))
    )
    of_logits = _saved(lambda: LogitSoftmaxStats({})(logits, labels, smoothing=0.1, cap=5.0))
    assert [it.data_ptr() for it in of_logits[:2]] == [logits.data_ptr(), labels.data_ptr()]
    assert [(it.shape, it.dtype) for it in of_logits[2:]] == [(labels.shape, wide)]
    bias = weight.detach()[:, 0].clone().requires_grad_()
    for biases in ([], [bias]):
        operands, own = (
            [x, weight, *biases],
            partial(_with_bias, LinearSoftmaxStats({}, 7), x, weight, *biases, labels),
        )
        of_product = _saved(partial(own, smoothing=0.1, cap=5.0))
        assert [it.data_ptr() for it in of_product[:-1]] == [
            it.data_ptr() for it in (*operands, labels)
        ]
        assert [(it.shape, it.dtype) for it in of_product[-1:]] == [(labels.shape, wide)]
        of_whole = _saved(partial(_with_bias, LinearCrossEntropy({}, 7), *operands, labels))
        assert [(it.numel(), it.dtype) for it in of_whole] == [
            (it.numel(), dtype) for it in operands
        ]


def test_without_gradients_none_are_made_in_forward() -> None:
    x, weight, labels = _randn(5, 4), _randn(18, 4, seed=1), labels_of((5,), 18, "cpu")
    with torch.no_grad():
        assert not _saved(lambda: LinearCrossEntropy({}, 2)(x, weight, labels))
    frozen = weight.detach()
    loss = LinearCrossEntropy({}, 2)(x, frozen, labels)
    assert [it.shape for it in _saved(lambda: LinearCrossEntropy({}, 2)(x, frozen, labels))] == [
        x.shape
    ]
    torch.testing.assert_close(
        torch.autograd.grad(loss, x)[0], _gradients(x, weight, labels)[0], atol=1e-12, rtol=0
    )


def _gradients(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(PLAIN.of(F.linear(x, weight), labels), (x, weight))


def test_gradients_made_in_forward_serve_once() -> None:
    """They are multiplied in place, which autograd notices."""
    x, weight, labels = _randn(5, 4), _randn(18, 4, seed=1), labels_of((5,), 18, "cpu")
    loss = LinearCrossEntropy({}, 2)(x, weight, labels)
    torch.autograd.grad(loss, x, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, x)


def _by_classes(*operands: Tensor) -> Tensor:
    return joined(
        lambda axis: _with_bias(LinearSoftmaxStats({}, 7), *operands), operands[-1], 18, 1, PLAIN
    )


def _by_tokens(*operands: Tensor) -> Tensor:
    return _with_bias(LinearCrossEntropy({}, 2), *operands)


@pytest.mark.parametrize("learns", ["weight", "bias", "weight and bias"])
@pytest.mark.parametrize("loss", [_by_classes, _by_tokens])
def test_the_gradients_of_weights_are_put_off(loss: Callable[..., Tensor], learns: str) -> None:
    """Together, those of them that are asked for."""
    x, weight, bias, labels = (
        _randn(5, 4),
        _randn(18, 4, seed=1),
        _randn(18, seed=2),
        labels_of((5,), 18, "cpu"),
    )
    dx, dw, db = torch.autograd.grad(PLAIN.of(F.linear(x, weight, bias), labels), (x, weight, bias))
    weight.requires_grad_("weight" in learns)
    bias.requires_grad_("bias" in learns)
    later: list[Part] = []
    with set_apart(later):
        loss(x, weight, bias, labels).backward()
    torch.testing.assert_close(x.grad, dx, atol=1e-12, rtol=1e-12)
    assert weight.grad is None
    assert bias.grad is None
    assert len(later) == 1
    later.pop()()
    for it, right, name in ((weight, dw, "weight"), (bias, db, "bias")):
        torch.testing.assert_close(
            it.grad, right if name in learns else None, atol=1e-12, rtol=1e-12
        )


@pytest.mark.parametrize("loss", [PLAIN, LOSSES[-1]])
def test_labels_with_gaps_between_them(loss: Loss) -> None:
    """A column of wider rows, and rows that are columns: they are those of the same labels side
    by side.
    """
    x, weight, bias = _randn(2, 5, 4), _randn(18, 4, seed=1), _randn(18, seed=2)
    ways: list[Callable[[Tensor], Tensor]] = [
        lambda labels: CrossEntropy({})(F.linear(x, weight, bias), labels, **loss.of_whole),
        lambda labels: joined(
            lambda _: LogitSoftmaxStats({})(F.linear(x, weight, bias), labels, **loss.of_parts),
            labels,
            18,
            1,
            loss,
        ),
        lambda labels: joined(
            lambda _: LinearSoftmaxStats({}, 7)(x, weight, labels, **loss.of_parts, bias=bias),
            labels,
            18,
            1,
            loss,
        ),
        lambda labels: LinearCrossEntropy({}, 3)(x, weight, labels, **loss.of_whole, bias=bias),
    ]
    for labels in (labels_of((2, 5, 4), 18, "cpu")[..., 1], labels_of((5, 2), 18, "cpu").T):
        assert not labels.is_contiguous()
        for way in ways:
            check_loss(
                lambda *_: way(labels),  # noqa: B023
                lambda *operands: loss.of(F.linear(*operands), labels),  # noqa: B023
                [x, weight, bias],
                EXACT,
            )


@pytest.mark.parametrize("loss", [_by_classes, _by_tokens])
def test_of_a_weight_that_is_made_of_parameters_nothing_is_put_off(
    loss: Callable[..., Tensor],
) -> None:
    x, half, labels = _randn(5, 4), _randn(9, 4, seed=1), labels_of((5,), 18, "cpu")
    later: list[Part] = []
    with set_apart(later):
        loss(x, torch.cat([half, half]), labels).backward()
    assert not later
    _, dw = _gradients(x, torch.cat([half, half]), labels)
    torch.testing.assert_close(half.grad, dw[:9] + dw[9:], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
def test_bfloat16_is_rounded_once_a_chunk(loss: Loss) -> None:
    """The gradients are as near to those of float64 as the element type lets them be."""
    x, weight = (
        it.detach().to(torch.bfloat16).requires_grad_()
        for it in (_randn(40, 16), _randn(96, 16, seed=1))
    )
    labels = labels_of((40,), 96, "cpu")
    bias = _randn(96, seed=2).detach().to(torch.bfloat16).requires_grad_()
    for chunk in (96, 16):
        parts, whole = LinearSoftmaxStats({}, chunk), LinearCrossEntropy({}, chunk)
        ways: list[Callable[..., Tensor]] = [
            lambda x, w, b: joined(
                lambda _: parts(x, w, labels, **loss.of_parts, bias=b),  # noqa: B023
                labels,
                96,
                1,
                loss,
            ),
            lambda x, w, b: whole(x, w, labels, **loss.of_whole, bias=b),  # noqa: B023
        ]
        for way in ways:
            check_loss(
                way,
                lambda *operands: loss.of(F.linear(*operands), labels),
                [x, weight, bias],
                Precision(torch.bfloat16, 8e-3, 1.6e-2),
            )
