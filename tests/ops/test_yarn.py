"""Frequencies of rotary positions that yarn scales, as transformers has them."""

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from scalec.runtime import Mesh, rope_frequencies
from scalec.testing.float64 import Reals

CASES = [
    (64, 1e4, 40.0, 32.0, 1.0, 4096.0),
    (64, 1e6, 4.0, 32.0, 1.0, 32768.0),
    (8, 1e4, 8.0, 32.0, 1.0, 64.0),
]
PLACE = 1000


@pytest.mark.parametrize(("dim", "theta", "factor", "high", "low", "original"), CASES)
def test_frequencies_are_those_of_transformers(
    dim: int, theta: float, factor: float, high: float, low: float, original: float
) -> None:
    """Cosines far out; transformers' frequencies are of float32."""
    named = {
        "rope_theta": theta,
        "factor": factor,
        "beta_fast": high,
        "beta_slow": low,
        "truncate": True,
    }
    rope = {"rope_type": "yarn", **named, "original_max_position_embeddings": int(original)}
    config = transformers.LlamaConfig(head_dim=dim, rope_parameters=rope)
    frequencies, _ = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    wanted = (PLACE * frequencies.double()).cos()
    plain = theta ** (-torch.arange(0, dim, 2).double() / dim)
    assert not torch.allclose(wanted, (PLACE * plain).cos(), atol=0.1, rtol=0)
    table = rope_frequencies(
        PLACE + 1,
        dim,
        theta,
        Mesh({"dp": 1}),
        torch.float64,
        "yarn",
        factor,
        low,
        high,
        original,
        seq_dim=-2,
    )
    assert torch.allclose(table[0, PLACE, : dim // 2], wanted, atol=1e-3, rtol=0)
    cosines, _ = Reals(1).angles(
        np.array([float(PLACE)]), dim // 2, theta, ("yarn", factor, low, high, original)
    )
    assert np.allclose(cosines.array.ravel(), wanted.numpy(), atol=1e-3, rtol=0)
