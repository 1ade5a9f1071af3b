"""Kernels in what torch.compile makes graphs of: each is an op of the graph, forward and backward,
without breaks.

On the meta device, where kernels count as on a GPU; nothing is run.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from scalec.runtime import fused_linear, kernels
from scalec.runtime.kernels import Tile
from scalec.runtime.kernels.attention.tiles import Block, Blocks
from scalec.runtime.ops.fused_linear import join

WHOLE, BLOCKS = {64: Tile(rows=1, warps=4)}, {64: Tile(rows=1, warps=4, columns=64)}


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="meta", requires_grad=True)


CALLS: dict[str, Callable[[], tuple[Any, tuple[Tensor, ...], dict[str, float]]]] = {
    "RMSNorm": lambda: (kernels.RMSNorm(WHOLE), (_randn(8, 64), _randn(64)), {"eps": 1e-5}),
    "AddRMSNorm": lambda: (
        kernels.AddRMSNorm(WHOLE),
        (_randn(8, 64), _randn(8, 64), _randn(64)),
        {"eps": 1e-5},
    ),
    "SiluMul": lambda: (kernels.SiluMul(BLOCKS), (_randn(8, 64), _randn(8, 64)), {}),
    "RopePair": lambda: (
        kernels.RopePair(WHOLE),
        (_randn(8, 1, 4, 64), _randn(8, 1, 2, 64), _randn(2, 8, 1, 1, 64).detach()),
        {},
    ),
}


KERNEL, BLOCK = "triton_kernel_wrapper_mutation", Block(32, 32, warps=4, stages=2)


def _bodies(function: Callable[..., Any], *operands: Tensor, **options: Any) -> list[Counter[str]]:
    """What the forward and the backward of each autograd function in the graph of a call do, by
    target.
    """
    seen: list[Counter[str]] = []

    def backend(graph: GraphModule, _: object) -> Any:
        bodies = [
            body for label, body in graph.named_modules() if label and isinstance(body, GraphModule)
        ]
        seen.extend(
            Counter(str(node.target).rpartition(" ")[2] for node in body.graph.nodes)
            for body in bodies
        )
        raise _Seen

    torch.compiler.reset()
    with pytest.raises(Exception, match="_Seen"):
        torch.compile(function, backend=backend, fullgraph=True)(*operands, **options)
    return seen


@pytest.fixture(autouse=True)
def _without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    # else dynamo looks for a GPU's driver
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)


@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_is_an_op_of_the_graph(name: str) -> None:
    op, operands, options = CALLS[name]()
    assert [body[KERNEL] for body in _bodies(op, *operands, **options)] == [1, 1]


@pytest.mark.parametrize("documents", [False, True])
def test_attention_is_in_the_graph(documents: bool) -> None:
    """To documents, or with a window: forward one kernel, backward those of the rows' sums, of
    keys and of queries.
    """
    q, k, v = _randn(64, 2, 4, 64), _randn(64, 2, 2, 64), _randn(64, 2, 2, 64)
    ids = torch.zeros(64, 2, dtype=torch.int32, device="meta") if documents else None
    attention = kernels.Attention({64: Blocks(BLOCK, BLOCK, BLOCK)})
    found = _bodies(
        lambda *it: attention(*it, layout="sbhd", window=0 if documents else 8, documents=ids),
        q,
        k,
        v,
    )
    assert [body[KERNEL] for body in found] == [1, 3]


def test_weights_side_by_side_are_one_product_in_the_graph() -> None:
    """Of a layer's beginning: one product forward, two backward, and a kernel each for
    rotations.
    """
    flat = torch.randn(256, 128, device="meta")
    weights = [nn.Parameter(part) for part in flat.split([128, 64, 64])]
    join(weights[0], flat)
    layer = kernels.RopePair(WHOLE)

    def begun(x: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        q, k, v = fused_linear(x, *weights, into=((2, 64), (1, 64), (1, 64)), apart=(2,))
        return *layer(q, k, table), v

    product, d_product, turned, d_turned = _bodies(
        begun, _randn(8, 1, 128), _randn(2, 8, 1, 1, 64).detach()
    )
    assert (turned[KERNEL], d_turned[KERNEL]) == (1, 1)
    assert (product["linear>"], product["matmul>"], d_product["matmul>"]) == (1, 0, 2), (
        product,
        d_product,
    )


class _Seen(Exception):
    """Ends what would be run."""
