"""Without a GPU the optimizer is that of torch's kernels, to the last bit."""

import pytest
import torch

from helpers.kernels.cases import Precision
from helpers.kernels.cases_adamw import SIZES, check_steps, made, states
from scalec.runtime.kernels import AdamW
from scalec.runtime.state import optimizers

WIDE = Precision(torch.float64, 1e-14, 1e-13)


@pytest.mark.parametrize("scale", [None, 0.25])
@pytest.mark.parametrize(("layers", "size"), SIZES)
def test_in_float64_it_equals_torchs_optimizer(layers: int, size: int, scale: float | None) -> None:
    check_steps(made(layers, size, WIDE, "cpu", torch.float32), AdamW((0.9, 0.95)), WIDE, scale)


@pytest.mark.parametrize(
    ("dtype", "master"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)]
)
def test_a_state_has_the_same_names_and_bits(dtype: torch.dtype, master: torch.dtype) -> None:
    (model, ours), (other, theirs) = (
        states(made, "cpu", dtype, master) for made in (AdamW(), optimizers.AdamW())
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )
