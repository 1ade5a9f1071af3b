"""Initial values: a function of seed, name and global index, whatever the sharding."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from helpers.forked_ranks import run_ranks
from scalec.runtime import Mesh, normal, ones, weight, zeros
from scalec.runtime.state import parameters
from scalec.runtime.state.parameters import Init, initialise

Split = Mapping[int, tuple[str, ...]]


def _fill(
    mesh: Mesh, shape: tuple[int, ...], split: Split, init: Init, seed: int = 0, name: str = "w"
) -> Tensor:
    declared = weight(mesh, *shape, shard=split, init=init)
    local = torch.empty(declared.shape, dtype=torch.float64)
    initialise(local, declared.spec, mesh, seed, name)
    return local


def _whole(**changed: object) -> Tensor:
    settings = {"seed": 0, "name": "w", **changed}
    return _fill(Mesh({}), (12, 8), {}, normal(1.0), **settings)  # type: ignore[arg-type]


def _part(split: Split) -> tuple[tuple[int, ...], Tensor]:
    mesh = Mesh({"dp": 2, "tp": 2})
    declared = weight(mesh, 12, 8, shard=split, init=normal(1.0))
    return declared.spec.offsets(mesh), _fill(mesh, (12, 8), split, normal(1.0))


@pytest.mark.parametrize(
    "split", [{0: ("tp",)}, {1: ("tp",)}, {0: ("dp",), 1: ("tp",)}, {0: ("dp", "tp")}]
)
def test_every_sharding_starts_from_the_same_values(split: Split) -> None:
    whole = torch.full((12, 8), torch.nan, dtype=torch.float64)
    for (row, column), part in run_ranks(4, _part, split):
        whole[row : row + part.shape[0], column : column + part.shape[1]] = part
    assert torch.equal(whole, _whole())


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _whole()
    monkeypatch.setattr(parameters, "_CHUNK", 7)
    assert torch.equal(_whole(), expected)


def test_seed_and_name_change_the_values() -> None:
    values = [_whole(), _whole(seed=1), _whole(name="v")]
    assert not any(torch.equal(a, b) for i, a in enumerate(values) for b in values[:i])
    assert len(values[0].unique()) == values[0].numel()


def test_values_are_distributed_as_asked() -> None:
    x = _fill(Mesh({}), (400, 500), {}, normal(0.02)) / 0.02
    assert abs(x.mean().item()) < 0.01
    assert x.std().item() == pytest.approx(1, abs=0.01)
    assert (x.abs() < 1).double().mean().item() == pytest.approx(0.6827, abs=0.005)
    assert x.abs().max().item() == pytest.approx(4.5, abs=1)
    neighbours = torch.corrcoef(torch.stack([x.flatten()[:-1], x.flatten()[1:]]))[0, 1]
    assert abs(neighbours.item()) < 0.01
    assert (_fill(Mesh({}), (3,), {}, ones()) == 1).all()
    assert (_fill(Mesh({}), (3,), {}, zeros()) == 0).all()


def test_values_stay_what_they_are() -> None:
    """Computed once, by hand, with Python integers and math: a change would break every
    checkpoint's provenance.
    """
    expected = [_by_hand("0/w", index) for index in range(4)]
    torch.testing.assert_close(_whole().flatten()[:4], torch.tensor(expected, dtype=torch.float64))


def _by_hand(key: str, index: int) -> float:
    import hashlib
    import math

    def uniform(counter: int) -> float:
        z = (
            int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
            + counter * 0x9E3779B97F4A7C15
        ) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return (((z ^ z >> 31) >> 11) + 0.5) / 2**53

    return math.sqrt(-2 * math.log(uniform(2 * index))) * math.cos(
        2 * math.pi * uniform(2 * index + 1)
    )


def test_a_dim_that_does_not_divide_is_refused() -> None:
    mesh = Mesh({})
    mesh.axes = {"tp": 3}
    with pytest.raises(AssertionError, match="not divisible"):
        weight(mesh, 8, shard={0: ("tp",)}, init=ones())
