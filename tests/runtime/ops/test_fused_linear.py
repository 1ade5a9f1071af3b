"""Products of one value with several weights that a group has side by side, as one."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.nn.functional import linear, silu

from helpers.counted_products import products
from scalec.runtime import (
    AdamW,
    Bucket,
    Mesh,
    ParamGroup,
    TrainState,
    fused_linear,
    kernels,
    normal,
    weight,
)
from scalec.runtime.ops.delayed_wgrad import Part, set_apart

SIZES = (6, 2, 2)
NARROW, WIDE = 4, 5
"""Of weights: backward is a product for each weight where Σn = 10 is more than 2 · k, for all
where it is no more.
"""


class _Model(nn.Module):
    """Two layers whose weights of one product have others between them."""

    def __init__(self, mesh: Mesh, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(mesh, width) for _ in range(2))


class _Layer(nn.Module):
    def __init__(self, mesh: Mesh, width: int) -> None:
        super().__init__()
        for name, size in zip(("wq", "wk", "wv"), SIZES, strict=True):
            setattr(self, name, weight(mesh, size, width, init=normal(0.5)))
            setattr(self, f"{name}_bias", weight(mesh, size, init=normal(0.5)))

    def forward(self, x: Tensor) -> Tensor:
        return _loss(*fused_linear(x, *_weights(self), into=((3, 2), (1, 2), (2,)), apart=(2,)))


def _weights(layer: nn.Module) -> list[nn.Parameter]:
    return [cast(nn.Parameter, getattr(layer, name)) for name in ("wq", "wk", "wv")]


GROUPS = (
    ParamGroup(("layers.*.wq", "layers.*.wk", "layers.*.wv")),
    ParamGroup("layers.*.wq_bias", "layers.*.wk_bias", "layers.*.wv_bias"),
)


def _layers(width: int, **options: Any) -> tuple[TrainState, list[nn.Module]]:
    mesh = Mesh({})
    model = _Model(mesh, width)
    state = TrainState(
        model, mesh, {"all": Bucket(*GROUPS, **options)}, AdamW(), torch.float64, torch.float64
    )
    state.initialise(seed=0)
    return state, [*model.layers]


def _x(width: int) -> Tensor:
    return torch.randn(3, 5, width, dtype=torch.float64, requires_grad=True)


def _loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.sin().sum() + k.square().sum() + v.exp().sum()


def _separate(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    q, k, v = (linear(x, weight) for weight in weights)
    return q, k, v


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_results_and_gradients_are_those_of_products_by_themselves(
    width: int, per_layer: bool
) -> None:
    _, layers = _layers(width, per_layer=per_layer)
    for layer in layers:
        x, weights = _x(width), _weights(layer)
        q, k, v = fused_linear(x, *weights, into=((3, 2), (1, 2), (2,)), apart=(2,))
        assert [it.shape for it in (q, k, v)] == [(3, 5, 3, 2), (3, 5, 1, 2), (3, 5, 2)]
        assert (
            q.untyped_storage().data_ptr()
            == k.untyped_storage().data_ptr()
            != v.untyped_storage().data_ptr()
        )
        found = torch.autograd.grad(_loss(q, k, v), [x, *weights])
        expected = torch.autograd.grad(_loss(*_separate(x, weights)), [x, *weights])
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("width", "backward"), [(NARROW, 6), (WIDE, 2)])
def test_forward_is_one_product_and_backward_is_two_where_a_copy_costs_no_more(
    width: int, backward: int
) -> None:
    _, (layer, _) = _layers(width)
    with products() as forward:
        loss = layer(_x(width))
    assert len(forward) == 1
    with products() as found:
        loss.backward()
    assert len(found) == backward


def test_gradients_that_are_slices_of_one_are_not_copied() -> None:
    """Those of a gate whose halves are slices of one product; with others between them they are
    by themselves.
    """
    flat = nn.Parameter(torch.randn(24, 3, dtype=torch.float64))
    gate, up = (nn.Parameter(part) for part in flat.data.split(12))
    cast(Any, gate).whole = flat.data
    x, silu_mul = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True), kernels.SiluMul({})
    loss = silu_mul(*fused_linear(x, gate, up)).sin().sum()
    with products() as found:
        gradients = torch.autograd.grad(loss, [x, gate, up])
    assert len(found) == 2
    expected = torch.autograd.grad((silu(x @ gate.T) * (x @ up.T)).sin().sum(), [x, gate, up])
    torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wanted", [[0], [1, 2], [0, 3]])
def test_some_gradients_alone(wanted: Sequence[int]) -> None:
    _, (layer, _) = _layers(WIDE)
    of = [_x(WIDE), *_weights(layer)]
    found = torch.autograd.grad(layer(of[0]), [of[i] for i in wanted])
    expected = torch.autograd.grad(_loss(*_separate(of[0], of[1:])), [of[i] for i in wanted])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_gradients_of_weights_are_put_off(width: int) -> None:
    state, (layer, _) = _layers(width)
    weights, parts, x = _weights(layer), list[Part](), _x(width)
    state.zero()
    with set_apart(parts):
        layer(x).backward()
    assert x.grad is not None
    assert not any(w.grad.any() for w in weights if w.grad is not None)
    for part in parts:
        part()
    expected = torch.autograd.grad(_loss(*_separate(x, weights)), weights)
    torch.testing.assert_close([w.grad for w in weights], [*expected], rtol=1e-12, atol=1e-12)


def test_of_what_is_put_off_the_values_are_kept_and_not_the_graph() -> None:
    """That leads to what has entered a stage, and to its gradient."""
    _, (layer, _) = _layers(NARROW)
    entered, parts = _x(NARROW), list[Part]()
    alive = weakref.ref(entered)
    with set_apart(parts):
        layer(entered.sin()).backward()
    del entered
    assert parts
    assert alive() is None


def test_each_layers_weights_are_neighbours_and_other_patterns_lie_one_behind_the_other() -> None:
    _, layers = _layers(NARROW)
    for layer in layers:
        for first, second in pairwise(_weights(layer)):
            assert first.storage_offset() + first.numel() == second.storage_offset()
    first, second = (cast(Tensor, layer.get_parameter("wq_bias")) for layer in layers)
    assert first.storage_offset() + first.numel() == second.storage_offset()


def test_weights_that_no_group_joined_are_refused() -> None:
    _, (layer, _) = _layers(NARROW)
    wq, wk, _ = _weights(layer)
    for weights in ([wk, wq], [wq, wk]):
        with pytest.raises(AssertionError, match="fused_linear"):
            fused_linear(_x(NARROW), *weights)


@pytest.mark.parametrize("sizes", [((6, 4), (2, 3)), ((6, 4), (2, 2, 2))])
def test_what_is_no_one_matrix_is_not_joined(sizes: Sequence[tuple[int, ...]]) -> None:
    mesh, model = Mesh({}), nn.Module()
    for name, shape in zip("ab", sizes, strict=True):
        setattr(model, name, weight(mesh, *shape, init=normal(0.5)))
    with pytest.raises(AssertionError, match="differ in their rows"):
        TrainState(model, mesh, {"all": Bucket(ParamGroup(("a", "b")))}, AdamW())


def _compiled(backend: Callable[..., Any], width: int) -> None:
    """Both layers by one graph, before and after their weights have been elsewhere."""
    state, layers = _layers(width)
    counters.clear()
    torch.compiler.reset()
    for layer in layers:
        cast(Any, layer).compile(backend=backend, fullgraph=True, dynamic=False)
    for factor in (1.0, 1.5):
        for box in state.boxes():
            box.tensor.mul_(factor)
        for layer in layers:
            x, weights = _x(width), _weights(layer)
            found = torch.autograd.grad(layer(x), [x, *weights])
            expected = torch.autograd.grad(_loss(*_separate(x, weights)), [x, *weights])
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert counters["stats"]["unique_graphs"] == 1, dict(counters["stats"])


@pytest.mark.parametrize(("width", "count"), [(NARROW, 6), (WIDE, 2)])
def test_in_a_graph_it_is_one_product_too(width: int, count: int) -> None:
    """The same graph serves each layer."""
    found: dict[str, list[str]] = {}

    def keep(name: str, graph: Any, _: object) -> Any:
        found[name] = [str(node.target) for node in graph.graph.nodes if "mm" in str(node.target)]
        return make_boxed_func(graph)

    backend = aot_autograd(
        fw_compiler=partial(keep, "forward"), bw_compiler=partial(keep, "backward")
    )
    _compiled(backend, width)
    assert (len(found["forward"]), len(found["backward"])) == (1, count), found
