"""The calls that torch's flash attention takes, its private operators' signatures, and merging
by log-sum-exp.
"""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from scalec.runtime.ops import flash_attention, plain_attention
from scalec.runtime.ops.plain_attention import Setting, wide

ATEN: Any = cast(Any, torch.ops).aten
GIVEN = "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, "
BACK = "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
GRADIENTS = "float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
SCHEMAS = {
    "cpu": (
        f"{GIVEN}*, Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor"
        " logsumexp)",
        f"{BACK}float dropout_p, bool is_causal, *, Tensor? attn_mask=None, {GRADIENTS}",
    ),
    "cuda": (
        f"{GIVEN}bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor"
        " logsumexp, Tensor "
        "cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor rng_state, Tensor"
        " unused, Tensor "
        "debug_attn_mask)",
        f"{BACK}Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float"
        " dropout_p, bool is_causal, "
        f"Tensor philox_seed, Tensor philox_offset, *, {GRADIENTS}",
    ),
}
WHOLE = Setting(1, 0.3, -1, -1)
CAUSAL = replace(WHOLE, forth=0)
SLOPE = torch.Generator().manual_seed(1)


@pytest.mark.parametrize("device", SCHEMAS)
def test_operators_are_those_that_are_called(device: str) -> None:
    """As of torch 2.13; where one is another, `flash_attention` needs its new arguments."""
    name = flash_attention.OPERATORS[device]
    for operator, schema in zip((name, f"{name}_backward"), SCHEMAS[device], strict=True):
        assert str(getattr(ATEN, operator).default._schema) == f"aten::{operator}{schema}"


def _drawn(
    dtype: torch.dtype, queries: int = 6, keys: int = 6, seq: int = 1, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)

    def of(size: int, heads: int) -> Tensor:
        x = torch.randn(2, size, heads, 8, dtype=torch.float64, generator=draw).to(device, dtype)
        return x if seq else x.transpose(0, 1)

    return of(queries, 4), of(keys, 2), of(keys, 2)


@pytest.mark.parametrize(
    ("how", "keys", "taken"),
    [
        (WHOLE, 6, True),
        (WHOLE, 9, True),
        (CAUSAL, 6, True),
        (CAUSAL, 9, False),
        (replace(CAUSAL, shift=3), 6, False),
        (replace(WHOLE, shift=3), 6, True),
        (replace(CAUSAL, back=2), 6, False),
        (replace(WHOLE, back=2, forth=2), 6, False),
        (replace(WHOLE, forth=2), 6, False),
        (replace(WHOLE, cap=9.0), 6, False),
    ],
)
def test_calls_that_are_taken(how: Setting, keys: int, taken: bool) -> None:
    given = _drawn(torch.float32, keys=keys)
    assert flash_attention.takes(*given, None, how) == taken
    assert not flash_attention.takes(*given, torch.zeros(2, 6), how)
    assert not flash_attention.takes(*_drawn(torch.float32, keys=keys, device="meta"), None, how)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("how", "keys"), [(WHOLE, 6), (WHOLE, 9), (CAUSAL, 6)])
@pytest.mark.parametrize("seq", [0, 1])
def test_it_is_plain_attention(seq: int, how: Setting, keys: int, dtype: torch.dtype) -> None:
    """With gradients by a result and a log-sum-exp that other keys have a part in."""
    how, close = replace(how, seq=seq), 1e-12 if dtype == torch.float64 else 1e-5
    given = (*_drawn(dtype, keys=keys, seq=seq), None, None)
    found, expected = (
        it.forward(*given, how, dtype=wide(dtype)) for it in (flash_attention, plain_attention)
    )
    slope = torch.randn(found[0].shape, generator=SLOPE).to(dtype)
    merged = (expected[0].to(dtype) * 0.9, expected[1] + 0.4)
    of_flash, of_plain = (
        it.backward((*given, *merged), slope, how, dtype=wide(dtype))
        for it in (flash_attention, plain_attention)
    )
    for one, other in zip((*found, *of_flash), (*expected, *of_plain), strict=True):
        torch.testing.assert_close(one, other, atol=close, rtol=close)


@pytest.mark.parametrize("how", [WHOLE, CAUSAL])
def test_operators_for_cuda_take_what_they_are_given(how: Setting) -> None:
    """On the meta device: shapes and element types alone."""
    given = (*_drawn(torch.bfloat16, device="meta"), None, None)
    out, lse = flash_attention.forward(*given, how, dtype=torch.float32)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (
        given[0].shape,
        torch.float32,
        (2, 4, 6),
        torch.float32,
    )
    slope = torch.empty_like(given[0])
    gradients = flash_attention.backward(
        (*given, out.bfloat16(), lse), slope, how, dtype=torch.float32
    )
    assert [(it.shape, it.dtype) for it in gradients] == [
        (it.shape, torch.float32) for it in given[:3]
    ]
