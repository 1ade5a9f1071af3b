"""Kernels in what torch.compile makes graphs of: each is an op of the graph, forward and backward, without breaks.

On the meta device, where kernels count as on a GPU; nothing is run.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from scalec.runtime import kernels
from scalec.runtime.kernels import Tile

WHOLE, BLOCKS = {64: Tile(rows=1, warps=4)}, {64: Tile(rows=1, warps=4, columns=64)}


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="meta", requires_grad=True)


CALLS: dict[str, Callable[[], tuple[Any, tuple[Tensor, ...], dict[str, float]]]] = {
    "RMSNorm": lambda: (kernels.RMSNorm(WHOLE), (_randn(8, 64), _randn(64)), {"eps": 1e-5}),
    "AddRMSNorm": lambda: (kernels.AddRMSNorm(WHOLE), (_randn(8, 64), _randn(8, 64), _randn(64)), {"eps": 1e-5}),
    "SiluMul": lambda: (kernels.SiluMul(BLOCKS), (_randn(8, 64), _randn(8, 64)), {}),
    "RopePair": lambda: (
        kernels.RopePair(WHOLE),
        (_randn(8, 1, 4, 64), _randn(8, 1, 2, 64), _randn(2, 8, 1, 1, 64).detach()),
        {},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_is_an_op_of_the_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)  # else dynamo looks for a GPU's driver
    op, operands, options = CALLS[name]()
    seen: list[list[str]] = []

    def backend(graph: GraphModule, _: object) -> Any:
        bodies = [body for label, body in graph.named_modules() if label and isinstance(body, GraphModule)]
        seen.extend([str(node.target) for node in body.graph.nodes] for body in bodies)
        raise _Seen

    torch.compiler.reset()
    with pytest.raises(Exception, match="_Seen"):
        torch.compile(op, backend=backend, fullgraph=True)(*operands, **options)
    assert [body.count("triton_kernel_wrapper_mutation") for body in seen] == [1, 1], seen


class _Seen(Exception):
    """Ends what would be run."""
