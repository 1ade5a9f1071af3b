"""Whether two steps are the same, in float64."""

import pytest
from torch import Tensor

from helpers.oracle.reference import Step

TOLERANCE = 1e-9
SMALL = 1e-3
"""The least size that errors are relative to, as a part of the largest gradient: some gradients
are only rounding.
"""


def assert_same(got: Step, want: Step, at: str, tolerance: float = TOLERANCE) -> None:
    """Loss, norm, every gradient and every parameter."""
    assert got.loss == pytest.approx(want.loss, rel=tolerance, abs=0), at
    assert got.norm == pytest.approx(want.norm, rel=tolerance, abs=0), at
    assert got.gradients.keys() == want.gradients.keys(), at
    least = SMALL * max(gradient.abs().max().item() for gradient in want.gradients.values())
    for name, gradient in want.gradients.items():
        _assert_close(f"{at}gradient of {name}", got.gradients[name], gradient, least, tolerance)
        _assert_close(at + name, got.parameters[name], want.parameters[name], 0, tolerance)


def _assert_close(name: str, got: Tensor, expected: Tensor, least: float, tolerance: float) -> None:
    error, scale = (got - expected).abs().max().item(), max(expected.abs().max().item(), least)
    assert error <= tolerance * scale, (
        f"{name}: off by {error:.3g}, where the largest element is {scale:.3g}"
    )
