"""Dropout by global index: how much is dropped, and that seed, sample, site and place alone say
what.

What the function is, and emitted programs on ranks: `tests/end_to_end/test_dropout.py`.
"""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from helpers import reference_ops
from helpers.forked_ranks import run_ranks
from helpers.ranks_alone import axis_at, positions_at
from scalec.runtime import Input, Loader, Mesh, attention, dropout, fork
from scalec.runtime.data.mixture import Mixture, Part, Stream
from scalec.runtime.data.samples import Windows
from scalec.runtime.ops.dropout import draws_of

DRAWS = draws_of(range(6), seed=0)


def get_kept_mask(*shape: int, draws: Tensor = DRAWS, p: float = 0.5, site: int = 1) -> Tensor:
    """Which elements of [b, …] are kept."""
    return dropout(torch.ones(len(draws), *shape), draws, p, site, batch=0) > 0


@pytest.mark.parametrize("p", [0.0001, 0.1, 0.5, 0.9])
def test_as_much_is_dropped_as_is_said_and_the_rest_scaled(p: float) -> None:
    x = torch.full((6, 1000, 100), 3.0, dtype=torch.float64)
    y = dropout(x, DRAWS, p, site=1, batch=0)
    assert y.unique().tolist() == pytest.approx([0, 3 / (1 - p)])
    deviation = (p * (1 - p) / x.numel()) ** 0.5
    assert (y == 0).double().mean().item() == pytest.approx(p, abs=4 * deviation)
    for along in ((0, 1), (0, 2), (1, 2)):  # and so in each column, row and sample
        shares = (y == 0).double().mean(along)
        each = x.numel() / len(shares)
        assert (shares - p).abs().max() < 5 * (p * (1 - p) / each) ** 0.5 + 3 / each


def test_parts_of_ranks_are_parts_of_the_whole() -> None:
    x = torch.randn(8, 6, 4, 12)
    whole = dropout(x, DRAWS, 0.3, site=2, batch=1)
    for i in range(2):
        for j in range(4):
            for k in range(3):
                box = (
                    slice(4 * i, 4 * i + 4),
                    slice(2 * k, 2 * k + 2),
                    slice(None),
                    slice(3 * j, 3 * j + 3),
                )
                split = {0: axis_at(i, 2), 3: axis_at(j, 4)}
                part = dropout(x[box], DRAWS[2 * k : 2 * k + 2], 0.3, site=2, batch=1, split=split)
                assert torch.equal(part, whole[box])


@pytest.mark.parametrize("zigzag", [False, True])
def test_positions_drop_what_they_drop_of_the_whole(zigzag: bool) -> None:
    x = torch.randn(8, 6, 12)
    whole = dropout(x, DRAWS, 0.3, site=2, batch=1)
    for i in range(2):
        for j in range(3):
            places = positions_at(12, j, 3, zigzag)
            held = places.indices(torch.device("cpu"))
            part = dropout(
                x[4 * i : 4 * i + 4, :, held], DRAWS, 0.3, 2, 1, {0: axis_at(i, 2), 2: places}
            )
            assert torch.equal(part, whole[4 * i : 4 * i + 4, :, held])


def test_where_samples_lie_does_not_matter() -> None:
    x = torch.randn(6, 5, 7)
    ours, theirs = (
        dropout(each, DRAWS, 0.3, 1, batch) for each, batch in ((x, 0), (x.transpose(0, 1), 1))
    )
    assert torch.equal(ours, theirs.transpose(0, 1))


def test_sites_samples_repetitions_and_seeds_drop_apart() -> None:
    """Any two of them agree on half of the elements, and no draw is another's."""
    of_seed = [draws_of(range(6), seed) for seed in (0, 1)]
    forks = [each for each in fork(DRAWS, 3) if each is not None]
    nested = [each for own in forks for each in fork(own, 3) if each is not None]
    alike = [get_kept_mask(5000, draws=draws) for draws in (*of_seed, *forks, *nested)]
    alike += [get_kept_mask(5000, site=site) for site in range(2, 6)]
    rows = torch.cat(alike).double() * 2 - 1
    likeness = rows @ rows.T / rows.shape[1] - torch.eye(len(rows))
    assert likeness.abs().max() < 5.5 / rows.shape[1] ** 0.5


def test_far_indices_are_told_apart() -> None:
    """Of samples of 2^60 elements, the parts of the first and of the last ranks."""
    x, size = torch.ones(6, 2, 2, 1 << 10), 1 << 25
    parts = [
        dropout(x, DRAWS, 0.5, 1, 0, {1: axis_at(i, size), 3: axis_at(j, size)})
        for i in (0, size - 1)
        for j in (0, 1)
    ]
    parts.append(
        dropout(x, DRAWS, 0.5, 1, 0, {1: axis_at(size - 1, size), 3: axis_at(size - 1, size)})
    )
    rows = torch.stack(parts).flatten(1) - 1
    assert (rows @ rows.T / rows.shape[1] - torch.eye(len(rows))).abs().max() < 0.05


def test_backward_drops_the_same() -> None:
    x = torch.randn(6, 40, dtype=torch.float64, requires_grad=True)
    (dropout(x, DRAWS, 0.3, 1, 0) * 5).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad != 0, get_kept_mask(40, p=0.3))
    assert x.grad.unique().tolist() == pytest.approx([0, 5 / 0.7])


def test_nothing_of_the_operands_size_is_kept_for_backward() -> None:
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: sizes.append(x.numel()) or x, lambda x: x
    ):
        dropout(torch.randn(6, 1000, requires_grad=True), DRAWS, 0.3, 1, 0)
    assert sizes == [len(DRAWS)]


def test_computing_again_drops_the_same_whatever_torch_has_drawn() -> None:
    def f(x: Tensor) -> Tensor:
        torch.rand(3)
        return dropout(x.tanh(), DRAWS, 0.3, 1, 0).square()

    x = torch.randn(6, 40, dtype=torch.float64)
    once, again = (x.clone().requires_grad_() for _ in range(2))
    f(once).sum().backward()
    checkpoint(f, again, use_reentrant=False, preserve_rng_state=False).sum().backward()
    torch.testing.assert_close(again.grad, once.grad, rtol=0, atol=0)


def test_without_draws_nothing_is_dropped() -> None:
    x = torch.randn(6, 4)
    assert dropout(x, None, 0.5, 1, 0) is x
    assert fork(None, 3) == [None] * 3


def test_bits_stay_as_they_are() -> None:
    """So that a run that a later version takes up goes on as it began."""
    draws = draws_of([0, 1, 2**40], seed=7)
    bits = [
        "".join(str(int(each)) for each in row) for row in get_kept_mask(16, draws=draws, site=3)
    ]
    assert bits == ["1010110000010100", "0011100111011100", "1111001010110100"]


@pytest.mark.gpu
def test_a_gpu_drops_what_a_cpu_drops() -> None:
    x = torch.randn(6, 100, 30, dtype=torch.float64)
    cpu = dropout(x, DRAWS, 0.3, 2, batch=0, split={2: axis_at(3, 1 << 30)})
    gpu = dropout(x.cuda(), DRAWS.cuda(), 0.3, 2, batch=0, split={2: axis_at(3, 1 << 30)})
    torch.testing.assert_close(gpu.cpu(), cpu, rtol=0, atol=0)


# ---- attention


def _heads(number: int, **shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(6, 5, shape["heads"], 8, dtype=torch.float64, generator=generator)


def test_attention_drops_weights() -> None:
    """In the order of head, query and key; each part of the heads drops what it drops of the
    whole.
    """
    q, k, v = _heads(0, heads=4), _heads(1, heads=2), _heads(2, heads=2)
    got = attention(q, k, v, layout="bshd", draws=DRAWS, dropout=0.3, site=2)
    want = reference_ops.attention(
        q,
        k,
        v,
        change_weights=lambda weights: weights * get_kept_mask(4, 5, 5, p=0.3, site=2) / 0.7,
    )
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for i in range(2):
        mine, few = slice(2 * i, 2 * i + 2), slice(i, i + 1)
        part = attention(
            q[:, :, mine],
            k[:, :, few],
            v[:, :, few],
            draws=DRAWS,
            dropout=0.3,
            site=2,
            heads=axis_at(i, 2),
        )
        torch.testing.assert_close(part, want[:, :, mine], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "options", [{}, {"causal": False}, {"window": 2}, {"softcap": 2.0}, {"scale": 0.2}]
)
def test_attention_that_drops_next_to_nothing_is_attention(options: dict[str, float]) -> None:
    q, k, v = _heads(0, heads=4), _heads(1, heads=2), _heads(2, heads=2)
    documents = torch.arange(30).view(6, 5) // 3
    for given in (None, documents):
        plain: Tensor = cast(Any, attention)(q, k, v, **options, documents=given)
        how = {"draws": DRAWS, "dropout": 1e-18, "site": 1}
        dropped: Tensor = cast(Any, attention)(q, k, v, **options, **how, documents=given)
        torch.testing.assert_close(dropped, plain, rtol=1e-12, atol=1e-12)


# ---- draws


def _draws(folder: Path, split: dict[str, tuple[str, ...]], microbatches: int) -> Tensor:
    """The draws of this rank in steps 0 and 1, as [steps · microbatches, rows]."""
    stream = Stream([str(folder / "data.bin")], torch.uint8, 5)
    tokens, draws = (Input(dims, split) for dims in (("batch", "seq"), ("batch",)))
    inputs = {"tokens": tokens, "labels": tokens, "draws": draws}
    loader = Loader(
        Mixture([Part("", stream)]),
        Windows(),
        inputs,
        Mesh({"dp": 2, "tp": 2}),
        8,
        microbatches,
        256,
        seed=3,
    )
    found = [loader.batch(step).draws for step in range(2)]
    return torch.cat([each for each in found if each is not None])


def test_draws_follow_the_samples_number_on_any_mesh(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(bytes(200))
    want = draws_of(range(16), seed=3)
    ranks: list[Tensor] = run_ranks(4, _draws, tmp_path, {"batch": ("dp",)}, 2)
    for i, found in enumerate(ranks):
        assert torch.equal(found, want.view(4, 2, 2)[:, i // 2])
    assert all(
        torch.equal(found.flatten(), want) for found in run_ranks(4, _draws, tmp_path, {}, 4)
    )
    assert len({*want.tolist(), *draws_of(range(16), seed=4).tolist()}) == 32
