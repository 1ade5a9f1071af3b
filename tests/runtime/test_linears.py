"""Products of one value with several weights, as one where the weights are neighbours in memory."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from scalec.runtime import AdamW, Bucket, Group, Mesh, State, linears, normal, weight
from scalec.runtime.deferred import Part, set_apart

SIZES, WIDTH = (6, 2, 2), 4


def _weights(neighbours: bool) -> list[nn.Parameter]:
    torch.manual_seed(0)
    flat = torch.randn(sum(SIZES) * WIDTH, dtype=torch.float64)
    parts = [part.view(-1, WIDTH) for part in flat.split([size * WIDTH for size in SIZES])]
    return [nn.Parameter(part if neighbours else part.clone()) for part in parts]


def _loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.sin().sum() + k.square().sum() + v.exp().sum()


@pytest.mark.parametrize("apart", [(), (2,)])
@pytest.mark.parametrize("neighbours", [True, False])
def test_results_and_gradients_are_those_of_products_by_themselves(neighbours: bool, apart: Sequence[int]) -> None:
    weights = _weights(neighbours)
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    q, k, v = linears(x, *weights, into=((3, 2), (1, 2), (2,)), apart=apart)
    assert [it.shape for it in (q, k, v)] == [(3, 5, 3, 2), (3, 5, 1, 2), (3, 5, 2)]
    found = torch.autograd.grad(_loss(q, k, v), [x, *weights])
    expected = torch.autograd.grad(_loss(*(linear(x, w) for w in weights)), [x, *weights])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class _Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **kwargs or {})


def _products(weights: Sequence[Tensor]) -> int:
    with _Products() as products, torch.no_grad():
        linears(torch.randn(3, WIDTH, dtype=weights[0].dtype), *weights)
    return products.count


def test_neighbours_are_one_product_and_what_is_kept_apart_has_memory_of_its_own() -> None:
    assert _products(_weights(True)) == 1
    assert _products(_weights(False)) == 3
    q, k, v = linears(torch.randn(3, WIDTH, dtype=torch.float64), *_weights(True), apart=(2,))
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() != v.untyped_storage().data_ptr()


def test_gradients_of_weights_are_put_off() -> None:
    weights, parts = _weights(True), list[Part]()
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    with set_apart(parts):
        _loss(*linears(x, *weights)).backward()
    assert x.grad is not None
    assert [w.grad for w in weights] == [None] * 3
    for part in parts:
        part()
    expected = torch.autograd.grad(_loss(*(linear(x, w) for w in weights)), weights)
    torch.testing.assert_close([w.grad for w in weights], [*expected], rtol=1e-12, atol=1e-12)


class _Layer(nn.Module):
    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.wq = weight(mesh, 6, WIDTH, init=normal(0.1))
        self.norm = weight(mesh, WIDTH, init=normal(0.1))
        self.wk = weight(mesh, 2, WIDTH, init=normal(0.1))


class _Model(nn.Module):
    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(mesh) for _ in range(2))


def test_weights_of_a_turn_are_neighbours_in_a_bucket() -> None:
    mesh = Mesh({})
    model = _Model(mesh)
    State(model, mesh, {"all": Bucket(Group("layers.*.wq", "layers.*.wk"), Group("layers.*.norm"))}, AdamW())
    for layer in model.layers:
        assert isinstance(layer, _Layer)
        assert _products([layer.wq, layer.wk]) == 1
