"""Attention without a GPU: plain torch in the kernels' place, what it keeps, and which backend
a call takes.
"""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from helpers.kernels.cases_attention import SMALL
from scalec.runtime import attention
from scalec.runtime.kernels import Attention
from scalec.runtime.kernels.attention.op import backend

OPTIONS: list[dict[str, Any]] = [
    {"layout": "sbhd"},
    {"layout": "bshd", "causal": False},
    {"layout": "sbhd", "window": 7},
    {"layout": "bshd", "window": 3, "causal": False, "softcap": 2.0},
    {"layout": "sbhd", "documents": True, "scale": 0.3},
    {"layout": "bshd", "documents": True, "window": 300, "softcap": 1.0},
]
LENGTH = 300
"""More queries than plain torch takes at a time."""


def _operands(seq: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    rows = (LENGTH, 2) if seq == 0 else (2, LENGTH)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(*rows, heads, 8, dtype=dtype, generator=draw).requires_grad_()
        for heads in (4, 2, 2)
    )
    return q, k, v


def _given(options: dict[str, Any]) -> dict[str, Any]:
    ids = torch.arange(LENGTH).div(40, rounding_mode="floor").repeat(2, 1)
    ids = ids if options["layout"] == "bshd" else ids.T
    return options | {"documents": ids if "documents" in options else None}


def _partial(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    given = _given(options)
    ids, seq = given.pop("documents"), given.pop("layout").index("s")
    return Attention({8: SMALL}).partial(q, k, v, seq, **given, q_documents=ids, k_documents=ids)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_plain_torch_is_exact_in_float64(options: dict[str, Any]) -> None:
    """Against the runtime's attention, in value and gradients."""
    qkv = _operands(options["layout"].index("s"))
    actual, expected = _partial(*qkv, options)[0], attention(*qkv, **_given(options))
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)
    gradient = torch.randn(
        actual.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    for one, other in zip(
        *(torch.autograd.grad(it, qkv, gradient) for it in (actual, expected)), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_call_is_the_runtime_s_attention(options: dict[str, Any]) -> None:
    qkv = _operands(options["layout"].index("s"), torch.float32)
    actual, expected = Attention({})(*qkv, **_given(options)), attention(*qkv, **_given(options))
    torch.testing.assert_close(actual, expected)
    assert actual.stride() == (actual.shape[1] * 32, 32, 8, 1)


def test_dropout_is_the_runtime_s() -> None:
    qkv = _operands(1)
    given: dict[str, Any] = {
        "layout": "bshd",
        "draws": torch.tensor([3, 4]),
        "dropout": 0.5,
        "site": 1,
    }
    torch.testing.assert_close(
        Attention({8: SMALL})(*qkv, **given), attention(*qkv, **given), atol=0, rtol=0
    )


def get_saved_tensors(run: Any) -> list[Tensor]:
    kept: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run()
    return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_keeps_its_operands_its_result_and_a_sum_for_each_row(dtype: torch.dtype) -> None:
    qkv, options = _operands(0, dtype), {"layout": "sbhd", "softcap": 1.0, "documents": True}
    results: list[Tensor] = []
    kept = get_saved_tensors(lambda: results.extend(_partial(*qkv, options)))
    ids, *rest = kept[3:]
    assert [it.data_ptr() for it in kept[:3]] == [it.data_ptr() for it in qkv]
    assert (ids.dtype, ids.shape) == (torch.int64, (LENGTH, 2))
    assert [it.data_ptr() for it in rest[1:]] == [it.data_ptr() for it in results]
    assert results[1].shape == (2, 4, LENGTH)
    assert results[1].dtype == dtype


def test_queries_that_see_nothing() -> None:
    """They have 0 and −∞, and nothing has a gradient."""
    qkv = _operands(0)
    out, lse = Attention({}).partial(*qkv, 0, shift=-LENGTH)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))
    assert all(not it.any() for it in torch.autograd.grad(out.sum(), qkv))


def _on_gpu(dim: int, dtype: torch.dtype, heads: int = 2) -> Tensor:
    """What a choice of backend sees of a tensor on a GPU, on a machine without one."""
    return cast(
        Tensor, SimpleNamespace(is_cuda=True, is_meta=False, dtype=dtype, shape=(4, 1, heads, dim))
    )


HALF, FULL, DOUBLE = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("dim", "dtype", "special", "drops", "expected"),
    [
        (128, HALF, False, False, "torch"),
        (128, HALF, True, False, "triton"),
        (128, HALF, True, True, "torch"),
        (128, FULL, False, False, "torch"),
        (128, FULL, True, False, "triton"),
        (20, FULL, False, False, "torch"),
        (64, FULL, True, False, "plain"),
        (128, DOUBLE, False, False, "torch"),
        (128, DOUBLE, True, False, "plain"),
        (64, FULL, False, False, "torch"),
        (64, HALF, False, False, "torch"),
        (64, HALF, True, False, "plain"),
        (20, HALF, False, False, "triton"),
    ],
)
def test_which_backend_a_call_takes_on_a_gpu(
    dim: int, dtype: torch.dtype, special: bool, drops: bool, expected: str
) -> None:
    q = _on_gpu(dim, dtype)
    blocks = {20: SMALL, 128: SMALL}
    assert backend(Attention(blocks), q, q, q, special=special, drops=drops) == expected


@pytest.mark.parametrize(("dim", "expected"), [(128, "triton"), (64, "torch")])
def test_float32_with_fewer_heads_of_keys_takes_our_kernel_where_it_has_blocks(
    dim: int, expected: str
) -> None:
    """torch would hold all scores."""
    q, k, blocks = _on_gpu(dim, FULL, heads=4), _on_gpu(dim, FULL), {128: SMALL}
    assert backend(Attention(blocks), q, k, k, special=False, drops=False) == expected


@pytest.mark.parametrize(
    ("special", "drops", "expected"),
    [(False, False, "torch"), (True, False, "plain"), (True, True, "torch")],
)
def test_which_backend_a_call_takes_on_a_cpu(special: bool, drops: bool, expected: str) -> None:
    q = torch.empty(4, 1, 2, 128)
    blocks = {128: SMALL}
    assert backend(Attention(blocks), q, q, q, special=special, drops=drops) == expected
