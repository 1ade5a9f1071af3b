"""The reference of all oracles is what torch and transformers compute: values and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from helpers import reference_ops

SEQ, HEADS, HEAD_DIM = 7, 4, 8


def operand(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def assert_same_function(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *operands: Tensor
) -> None:
    """Compares values and the gradients of all operands."""
    found, expected = ours(*operands), theirs(*operands)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    pull = torch.randn(expected.shape, dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad(found, operands, pull),
        torch.autograd.grad(expected, operands, pull),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(approximate: str) -> None:
    assert_same_function(
        lambda x: reference_ops.gelu(x, approximate),
        lambda x: F.gelu(x, approximate=approximate),
        operand(5, 6),
    )


def test_silu_and_softmax() -> None:
    assert_same_function(reference_ops.silu, F.silu, operand(5, 6))
    for dim in (0, -1):
        assert_same_function(
            lambda x, dim=dim: reference_ops.softmax(x, dim),
            lambda x, dim=dim: F.softmax(x, dim),
            operand(5, 6),
        )


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_norms(shape: tuple[int, ...]) -> None:
    x, weight, bias = operand(5, *shape), operand(*shape, seed=1), operand(*shape, seed=2)
    assert_same_function(
        lambda x, w: reference_ops.rms_norm(x, w, 0.1),
        lambda x, w: F.rms_norm(x, shape, w, 0.1),
        x,
        weight,
    )
    assert_same_function(
        lambda x, w: reference_ops.layer_norm(x, w, eps=0.1),
        lambda x, w: F.layer_norm(x, shape, w, eps=0.1),
        x,
        weight,
    )
    assert_same_function(
        lambda x, w, b: reference_ops.layer_norm(x, w, b, eps=0.1),
        lambda x, w, b: F.layer_norm(x, shape, w, b, 0.1),
        x,
        weight,
        bias,
    )


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention(kv_heads: int) -> None:
    q, k, v = operand(2, SEQ, HEADS, HEAD_DIM), *(operand(2, SEQ, kv_heads, 8) for _ in range(2))
    distance = torch.arange(SEQ)[:, None] - torch.arange(SEQ)
    near, ids = distance.abs() < 3, torch.tensor([[0, 0, 1, 1, 1, 0, 2], [3, 3, 3, 3, 4, 4, 4]])
    alike = (ids[:, :, None] == ids[:, None, :])[:, None]
    cases: list[tuple[dict[str, Any], Tensor | None]] = [
        ({}, distance >= 0),
        ({"causal": False}, None),
        ({"scale": 0.5, "window": 3}, (distance >= 0) & near),
        ({"causal": False, "window": 3}, near),
        ({"documents": ids}, (distance >= 0) & alike),
    ]
    for options, seen in cases:
        assert_same_function(
            lambda q, k, v, options=options: reference_ops.attention(q, k, v, **options),
            lambda q, k, v, options=options, seen=seen: F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                attn_mask=seen,
                scale=options.get("scale"),
                enable_gqa=True,
            ).transpose(1, 2),
            q,
            k,
            v,
        )


def test_rope() -> None:
    frequencies = reference_ops.rope_frequencies(HEAD_DIM, 100.0)
    angle = torch.outer(torch.arange(SEQ).double(), frequencies).repeat(1, 2)[None]

    def theirs(x: Tensor) -> Tensor:
        return apply_rotary_pos_emb(x, x, angle.cos(), angle.sin(), unsqueeze_dim=2)[0]

    x = operand(2, SEQ, HEADS, HEAD_DIM)
    assert_same_function(lambda x: reference_ops.rope(x, frequencies), theirs, x)
    sequence_first = reference_ops.rope(x.transpose(0, 1), frequencies, seq=0)
    assert torch.equal(sequence_first.transpose(0, 1), reference_ops.rope(x, frequencies))
    wider = torch.cat([x, x], -1)
    turned = reference_ops.rope(wider, frequencies)
    assert torch.equal(turned[..., :HEAD_DIM], reference_ops.rope(x, frequencies))
    assert torch.equal(turned[..., HEAD_DIM:], x)


@pytest.mark.parametrize("factor", [4.0, 32.0])
def test_scaled_frequencies(factor: float) -> None:
    """Those of transformers are of float32."""
    plain = reference_ops.rope_frequencies(64, 1e4)

    def theirs(kind: str, **fields: float) -> Tensor:
        rope = {
            "rope_type": kind,
            "rope_theta": 1e4,
            "factor": factor,
            "original_max_position_embeddings": 4096,
            **fields,
        }
        config = transformers.LlamaConfig(head_dim=64, rope_parameters=rope)
        return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0].double()

    llama3 = reference_ops.llama3_frequencies(plain, factor, low=1, high=4, original=4096)
    expected = theirs("llama3", low_freq_factor=1.0, high_freq_factor=4.0)
    torch.testing.assert_close(llama3, expected, rtol=1e-5, atol=0)
    yarn = reference_ops.yarn_frequencies(plain, 1e4, factor, low=1, high=32, original=4096)
    expected = theirs("yarn", beta_slow=1.0, beta_fast=32.0, truncate=True)
    torch.testing.assert_close(yarn, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(smoothing: float) -> None:
    labels = torch.tensor([[0, 5, -1], [-100, 2, 2]])
    flat = labels.flatten().masked_fill(labels.flatten() < 0, -100)

    def theirs(logits: Tensor) -> Tensor:
        return F.cross_entropy(
            logits.flatten(0, -2), flat, reduction="sum", label_smoothing=smoothing
        )

    logits = operand(2, 3, 6)
    assert_same_function(
        lambda x: reference_ops.cross_entropy(x, labels, smoothing), theirs, logits
    )


def test_z_loss_and_cap_are_added_to_it() -> None:
    logits, labels = operand(2, 3, 6), torch.tensor([[0, 5, -1], [-100, 2, 2]])
    z_loss = 0.1 * logits.exp().sum(-1).log()[labels >= 0].square().sum()
    plain = reference_ops.cross_entropy(logits, labels)
    torch.testing.assert_close(reference_ops.cross_entropy(logits, labels, z=0.1), plain + z_loss)
    bounded = reference_ops.cross_entropy(2 * torch.tanh(logits / 2), labels)
    torch.testing.assert_close(reference_ops.cross_entropy(logits, labels, cap=2), bounded)
