"""The ops of emitted programs against plain torch."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from helpers import reference_ops
from helpers.forked_ranks import run_ranks
from helpers.ranks_alone import positions_at
from scalec.runtime import (
    Mesh,
    all_reduce,
    attention,
    clip_scale,
    concat,
    count_valid,
    cross_entropy,
    embedding,
    layer_norm,
    local_softmax_stats,
    max_logit,
    mean,
    mean_square,
    replicate,
    rms_norm,
    rms_scaled,
    rope,
    rope_frequencies,
    sum_squares,
    token_loss,
)

VOCAB, HIDDEN = 12, 8


def _check_equal(actual: Tensor | None, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


def _labels() -> Tensor:
    """[5, 3] with ignored ones, and none in the last third of the vocabulary: that rank holds
    no target.
    """
    labels = torch.randint(0, 8, (5, 3), generator=torch.Generator().manual_seed(1))
    labels[0, 0], labels[4, 1] = -1, -100
    return labels


def _logits(dtype: torch.dtype = torch.float64) -> Tensor:
    return (
        30
        * torch.randn(5, 3, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    ).to(dtype)


def _expected(
    logits: Tensor, labels: Tensor, classes: int = VOCAB, smoothing: float = 0.0, z: float = 0.0
) -> tuple[Tensor, Tensor]:
    logits = logits.detach().clone().requires_grad_()
    loss = reference_ops.cross_entropy(logits[..., :classes], labels, smoothing, z)
    (gradient,) = torch.autograd.grad(3 * loss, logits)
    return loss.detach(), gradient


def _vocabulary_parallel(classes: int = VOCAB, smoothing: float = 0.0, z_loss: float = 0.0) -> None:
    axis = Mesh({"tp": torch.distributed.get_world_size()}).axis("tp")
    whole, labels = _logits(), _labels()
    logits = whole.chunk(axis.size, -1)[axis.rank].clone().requires_grad_()
    m = all_reduce(max_logit(logits, axis, classes), axis, op="max")
    z, t = local_softmax_stats(logits, m, labels, axis, classes, smoothing)
    loss = token_loss(all_reduce(z, axis), all_reduce(t, axis), labels, m, z_loss)
    (3 * loss).backward()
    value, gradient = _expected(whole, labels, classes, smoothing, z_loss)
    _check_equal(loss.detach(), value)
    _check_equal(logits.grad, gradient.chunk(axis.size, -1)[axis.rank])


@pytest.mark.parametrize("world", [2, 3])
def test_vocabulary_parallel_loss_is_cross_entropy(world: int) -> None:
    run_ranks(world, _vocabulary_parallel)


@pytest.mark.parametrize("world", [2, 3])
def test_vocabulary_parallel_smoothing_and_z_loss(world: int) -> None:
    run_ranks(world, _vocabulary_parallel, VOCAB - 1, 0.1, 0.01)


LOSSES = [(VOCAB, 0.0, 0.0), (VOCAB, 0.1, 0.0), (VOCAB - 1, 0.0, 0.01), (VOCAB - 1, 0.1, 0.01)]
"""Classes that are no padding, smoothing, z-loss."""


@pytest.mark.parametrize(("classes", "smoothing", "z"), LOSSES)
def test_cross_entropy_in_float64(classes: int, smoothing: float, z: float) -> None:
    logits = _logits().requires_grad_()
    loss = cross_entropy(logits, _labels(), classes, smoothing, z)
    (3 * loss).backward()
    value, gradient = _expected(logits, _labels(), classes, smoothing, z)
    _check_equal(loss.detach(), value)
    _check_equal(logits.grad, gradient)


@pytest.mark.parametrize(("classes", "smoothing", "z"), LOSSES)
def test_cross_entropy_of_bfloat16_is_summed_in_float32(
    classes: int, smoothing: float, z: float
) -> None:
    logits = _logits(torch.bfloat16).requires_grad_()
    loss = cross_entropy(logits, _labels(), classes, smoothing, z)
    loss.backward()
    assert loss.dtype == torch.float32
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
    value, gradient = _expected(logits.float(), _labels(), classes, smoothing, z)
    torch.testing.assert_close(loss.detach(), value)
    torch.testing.assert_close(3 * logits.grad.float(), gradient, atol=1e-6, rtol=2**-7)


def test_a_step_without_valid_tokens_has_loss_and_gradient_zero() -> None:
    logits = _logits().requires_grad_()
    labels = torch.full((5, 3), -1)
    loss = cross_entropy(logits, labels)
    loss.backward()
    assert count_valid(labels).item() == 0
    assert count_valid(_labels()).item() == 13
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def _vocabulary_parallel_embedding() -> None:
    axis = Mesh({"tp": 2}).axis("tp")
    table = torch.randn(
        VOCAB, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    tokens = torch.tensor([[0, 5], [6, 11], [5, 5]])
    whole = table.clone().requires_grad_()
    F.embedding(tokens, whole).square().sum().backward()
    part = table.chunk(2)[axis.rank].clone().requires_grad_()
    out = all_reduce(embedding(tokens, part, axis), axis)
    assert torch.equal(out, F.embedding(tokens, table))
    out.square().sum().backward()
    assert whole.grad is not None
    _check_equal(part.grad, whole.grad.chunk(2)[axis.rank])


def test_vocabulary_parallel_embedding() -> None:
    run_ranks(2, _vocabulary_parallel_embedding)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rms_norm_computes_inside_in_float32_at_least(dtype: torch.dtype) -> None:
    x, weight = (10 * torch.randn(7, HIDDEN)).to(dtype), torch.randn(HIDDEN).to(dtype)
    expected = reference_ops.rms_norm(x.double(), weight.double(), eps=1e-5)
    assert rms_norm(x, weight, eps=1e-5).dtype == dtype
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-12
    torch.testing.assert_close(
        rms_norm(x, weight, eps=1e-5).double(), expected, atol=0, rtol=tolerance
    )


def test_rope_rotates_halves_by_position() -> None:
    table = rope_frequencies(6, HIDDEN, theta=100.0, mesh=Mesh({}), seq_dim=-4, dtype=torch.float64)
    x = torch.randn(6, 2, 3, HIDDEN, dtype=torch.float64)
    frequencies = reference_ops.rope_frequencies(HIDDEN, theta=100.0)
    _check_equal(rope(x, table), reference_ops.rope(x, frequencies, seq=0))
    batch_first = rope_frequencies(6, HIDDEN, theta=100.0, mesh=Mesh({}), dtype=torch.float64)
    assert torch.equal(rope(x.transpose(0, 1), batch_first), rope(x, table).transpose(0, 1))


def test_a_rank_s_rope_table_has_its_positions() -> None:
    whole = rope_frequencies(8, HIDDEN, theta=100.0, mesh=Mesh({}), seq_dim=-4)
    own = rope_frequencies(
        8, HIDDEN, 100.0, Mesh({}), positions=positions_at(8, 0, 2, zigzag=True), seq_dim=-4
    )
    assert torch.equal(own, whole[:, [0, 1, 6, 7]])


@pytest.mark.parametrize(("kv_heads", "width"), [(4, 8), (2, 8), (1, 8), (4, 5), (2, 11)])
def test_attention_is_causal_and_groups_queries(kv_heads: int, width: int) -> None:
    q = torch.randn(5, 2, 4, 8, dtype=torch.float64)
    k, v = (torch.randn(5, 2, kv_heads, size, dtype=torch.float64) for size in (8, width))
    batch_first = [x.transpose(0, 1) for x in (q, k, v)]
    expected = reference_ops.attention(*batch_first)
    _check_equal(attention(*batch_first, layout="bshd"), expected)
    _check_equal(attention(q, k, v, layout="sbhd"), expected.transpose(0, 1))


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": False}, {"window": 2}, {"softcap": 1.5}, {"causal": False, "window": 3}],
)
def test_attention_among_documents_is_that_of_each_alone(options: dict[str, Any]) -> None:
    """Ids need not be in order: what is alike is one document."""
    q = torch.randn(7, 2, 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(7, 2, 2, size, dtype=torch.float64, requires_grad=True) for size in (8, 5))
    documents = torch.tensor([[0, 0, 0, 2, 2, 1, 1], [5] * 7]).T
    alone = torch.empty(7, 2, 4, 5, dtype=torch.float64)
    for row, pieces in enumerate([(0, 3, 5, 7), (0, 7)]):
        for part in (slice(*ends) for ends in pairwise(pieces)):
            alone[part, row] = attention(
                *(x[part, row : row + 1] for x in (q, k, v)), layout="sbhd", **options
            )[:, 0]
    found = attention(q, k, v, layout="sbhd", documents=documents, **options)
    _check_equal(found, alone)
    dy = torch.randn_like(found)
    grads = zip(*(torch.autograd.grad(y, (q, k, v), dy) for y in (found, alone)), strict=True)
    for got, expected in grads:
        _check_equal(got, expected)
    swapped = attention(
        *(x.transpose(0, 1) for x in (q, k, v)), layout="bshd", documents=documents.T, **options
    )
    _check_equal(swapped.transpose(0, 1), found)


def test_sum_of_squares_and_clipping_are_those_of_torch() -> None:
    a, b = (torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2))
    a.grad, b.grad = torch.tensor([3.0, 0, 1]).double(), torch.tensor([0, -4.0, 2]).double()
    gradients = [a.grad.clone(), b.grad.clone()]
    norm = sum_squares(*gradients).sqrt()
    assert norm.item() == pytest.approx(
        torch.nn.utils.clip_grad_norm_([a, b], 2.0).item(), rel=1e-15
    )
    _check_equal(gradients[0] * clip_scale(norm, 2.0), a.grad)
    assert clip_scale(norm, 100.0).item() == 1
    assert sum_squares(torch.full((1 << 12,), 3e2, dtype=torch.bfloat16)).item() == 9e4 * (1 << 12)


def _mlp() -> None:
    axis = Mesh({"tp": 2}).axis("tp")
    x = torch.ones(2, 2, requires_grad=True)
    all_reduce(replicate(x, axis) * (axis.rank + 1), axis).sum().backward()
    assert x.grad is not None
    assert x.grad.unique().tolist() == [3.0]


def test_f_and_g_of_megatron_sum_over_ranks() -> None:
    run_ranks(2, _mlp)


def _random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))
    ).to(dtype)


@pytest.mark.parametrize(
    "weight", [_random(HIDDEN), _random(3, HIDDEN)], ids=["one dim", "two dims"]
)
@pytest.mark.parametrize("biased", [True, False])
def test_layer_norm_is_the_formula(weight: Tensor, biased: bool) -> None:
    x, over = _random(2, 5, 3, HIDDEN) + 7, tuple(range(-weight.dim(), 0))
    centred = x - x.mean(over, keepdim=True)
    expected = (
        centred / (centred.square().mean(over, keepdim=True) + 0.1).sqrt() * weight
        + biased * weight
    )
    _check_equal(layer_norm(x, weight, *[weight] * biased, eps=0.1), expected)


def test_means_divide_by_the_global_size() -> None:
    """A rank's part of a mean: two halves add up to it."""
    x = _random(2, 5, HIDDEN)
    left, right = x.chunk(2, -1)
    _check_equal(mean(x, dim=1, size=5), x.mean(1))
    _check_equal(mean(x, dim=(0, 2), size=2 * HIDDEN), x.mean((0, 2)))
    _check_equal(mean(left, dim=2, size=HIDDEN) + mean(right, dim=2, size=HIDDEN), x.mean(2))
    _check_equal(
        mean_square(left, dim=2, size=HIDDEN) + mean_square(right, dim=2, size=HIDDEN),
        x.square().mean(2),
    )


def _norm_over_a_sharded_dim() -> None:
    axis = Mesh({"tp": torch.distributed.get_world_size()}).axis("tp")
    whole, weight, dy = _random(2, 6, HIDDEN), _random(6, HIDDEN), 1 + _random(2, 6, HIDDEN)
    part = [tensor.chunk(axis.size, -2)[axis.rank].clone() for tensor in (whole, weight, dy)]
    x, w = (tensor.requires_grad_() for tensor in part[:2])
    square = replicate(all_reduce(mean_square(x, dim=(1, 2), size=6 * HIDDEN), axis), axis)
    y = rms_scaled(x, w, square, eps=0.1)
    whole, weight = whole.requires_grad_(), weight.requires_grad_()
    expected = rms_norm(whole, weight, eps=0.1)
    _check_equal(y.detach(), expected.detach().chunk(axis.size, -2)[axis.rank])
    y.backward(part[2])
    for found, wanted in zip(
        (x, w), torch.autograd.grad(expected, (whole, weight), dy), strict=True
    ):
        _check_equal(found.grad, wanted.chunk(axis.size, -2)[axis.rank])


@pytest.mark.parametrize("world", [2, 3])
def test_a_norm_over_a_sharded_dim_is_the_whole_norm(world: int) -> None:
    run_ranks(world, _norm_over_a_sharded_dim)


def test_concat_joins_last_dims() -> None:
    x, y = _random(2, 5, 3), _random(2, 5, 4)
    _check_equal(concat(x, y, x), torch.cat([x, y, x], -1))
    _check_equal(
        concat(x, y[0], x[:, :1]),
        torch.cat([x, y[:1].repeat(2, 1, 1), x[:, :1].repeat(1, 5, 1)], -1),
    )


def test_bfloat16_comes_out_as_it_went_in_and_is_summed_in_float32() -> None:
    x, weight = _random(4, 4096, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.bfloat16)
    square = mean_square(x, dim=1, size=4096)
    assert square.dtype == torch.float32
    torch.testing.assert_close(square, x.float().square().mean(1))
    scaled = rms_scaled(x, weight, square, eps=1e-5)
    assert scaled.dtype == torch.bfloat16
    torch.testing.assert_close(scaled, rms_norm(x, weight, eps=1e-5))
    assert torch.equal(mean(x, dim=1, size=4096), x.float().mean(1).bfloat16())
