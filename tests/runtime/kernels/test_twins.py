"""Torch twins of norms, rotary positions and gates on the CPU: exact in float64, and what they
save.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from helpers.kernels.saved_tensors import saved_by
from scalec.runtime import layer_norm, rms_norm, rope
from scalec.runtime.kernels import (
    AddLayerNorm,
    AddRMSNorm,
    GeluMul,
    LayerNorm,
    RMSNorm,
    Rope,
    RopePair,
    SiluMul,
    Tile,
)

X, W = (3, 5, 8), (8,)
TILES = {8: Tile(rows=4, warps=4)}
TABLE = torch.rand(
    2, 3, 1, 3, generator=torch.Generator().manual_seed(9), dtype=torch.float64
).repeat(1, 1, 1, 2)
TABLE[1, ..., :3] *= -1
EPS: dict[str, Any] = {"eps": 1e-5}


def _then(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A sum and what a norm makes of it."""
    return lambda x, y, *rest, eps: (x + y, norm(x + y, *rest, eps=eps))


def _each(table: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(rope(x, table) for x in tensors)


ROOT, PLAIN_GELU = ("root",), partial(F.gelu, approximate="tanh")
OPS = {
    "rms": (partial(RMSNorm(TILES), **EPS), partial(rms_norm, **EPS), [X, W], [0, 1, ROOT]),
    "rms_two_dims": (
        partial(RMSNorm(TILES), **EPS),
        partial(rms_norm, **EPS),
        [X, X[1:]],
        [0, 1, ROOT],
    ),
    "layer": (
        partial(LayerNorm(TILES), **EPS),
        partial(layer_norm, **EPS),
        [X, W, W],
        [0, 1, ROOT, ROOT],
    ),
    "layer_no_bias": (
        partial(LayerNorm(TILES), **EPS),
        partial(layer_norm, **EPS),
        [X, W],
        [0, 1, ROOT, ROOT],
    ),
    "add_rms": (
        partial(AddRMSNorm(TILES), **EPS),
        partial(_then(rms_norm), **EPS),
        [X, X, W],
        ["s", 2, ROOT],
    ),
    "add_layer": (
        partial(AddLayerNorm(TILES), **EPS),
        partial(_then(layer_norm), **EPS),
        [X, X, W, W],
        ["s", 2, ROOT, ROOT],
    ),
    "rope": (lambda x: Rope(TILES)(x, TABLE), lambda x: rope(x, TABLE), [X], ["table"]),
    "rope_whole": (
        lambda x: Rope(TILES)(x, TABLE),
        lambda x: rope(x, TABLE),
        [(3, 5, 6)],
        ["table"],
    ),
    "rope_pair": (
        lambda q, k: RopePair(TILES)(q, k, TABLE),
        partial(_each, TABLE),
        [X, (3, 1, 8)],
        ["table"],
    ),
    "silu": (SiluMul(TILES), lambda a, b: F.silu(a) * b, [X, X], [0, 1]),
    "gelu": (GeluMul(TILES), lambda a, b: F.gelu(a) * b, [X, X], [0, 1]),
    "gelu_tanh": (
        partial(GeluMul(TILES), approximate="tanh"),
        lambda a, b: PLAIN_GELU(a) * b,
        [X, X],
        [0, 1],
    ),
}
"""An op, plain torch, shapes of operands, and what is saved: operands by index, the sum, the
table, a number a row.
"""


def _operands(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


def _results(op: Callable[..., Any], operands: Sequence[Tensor]) -> list[Tensor]:
    """Results, and the gradients of a sum of them that tells elements and results apart."""
    out = op(*operands)
    results: list[Tensor] = list(out) if isinstance(out, tuple) else [out]
    generator = torch.Generator().manual_seed(4)
    seeds = [
        torch.randn(it.shape, generator=generator, dtype=torch.float64).to(it.dtype)
        for it in results
    ]
    return [*results, *torch.autograd.grad(results, list(operands), seeds)]


@pytest.mark.parametrize("name", OPS)
def test_twins_are_exact_in_float64(name: str) -> None:
    op, plain, shapes, _ = OPS[name]
    operands = _operands(shapes, torch.float64)
    for actual, expected in zip(_results(op, operands), _results(plain, operands), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", OPS)
def test_twins_of_bfloat16_compute_in_float32(name: str) -> None:
    op, plain, shapes, _ = OPS[name]
    operands = _operands(shapes, torch.bfloat16)
    wide = [operand.detach().double().requires_grad_() for operand in operands]
    for actual, expected in zip(_results(op, operands), _results(plain, wide), strict=True):
        assert actual.dtype == torch.bfloat16
        torch.testing.assert_close(actual.double(), expected, atol=0.06, rtol=2**-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_what_is_saved(name: str, dtype: torch.dtype) -> None:
    op, _, shapes, expected = OPS[name]
    operands = _operands(shapes, dtype)
    saved = saved_by(lambda: op(*operands))
    rows = operands[0].numel() // operands[-1].numel()
    assert len(saved) == len(expected)
    for tensor, what in zip(saved, expected, strict=True):
        if isinstance(what, int):
            assert tensor.data_ptr() == operands[what].data_ptr()
        elif what == ROOT:
            assert (tensor.shape, tensor.dtype) == (
                (rows,),
                torch.promote_types(dtype, torch.float32),
            )
        elif what == "s":
            assert (tensor.shape, tensor.dtype) == (X, dtype)
        else:
            assert tensor.data_ptr() == TABLE.data_ptr()


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", OPS)
def test_each_is_the_same_in_a_graph(name: str) -> None:
    """In float64, where what is computed is converted no more at the end: a result must not go
    by two names there.
    """
    op, _, shapes, _ = OPS[name]
    operands = _operands(shapes, torch.float64)
    torch.compiler.reset()  # pyright: ignore[reportUnknownMemberType]
    compiled = torch.compile(lambda *given: op(*given), backend="aot_eager", fullgraph=True)
    for actual, expected in zip(_results(compiled, operands), _results(op, operands), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_torch_compile_sees_through_all_of_it() -> None:
    """Without a break, since layers are compiled whole."""
    add_rms, add_layer, turn, gate = (
        AddRMSNorm(TILES),
        AddLayerNorm(TILES),
        RopePair(TILES),
        SiluMul(TILES),
    )

    def layer(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        s, a = add_rms(x, y, weight, **EPS)
        q, k = turn(a, 2 * a, TABLE)
        return add_layer(s, gate(q, k), weight, **EPS)

    operands = _operands([X, X, W], torch.float64)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for actual, expected in zip(
        _results(compiled, operands), _results(layer, operands), strict=True
    ):
        torch.testing.assert_close(actual, expected)
