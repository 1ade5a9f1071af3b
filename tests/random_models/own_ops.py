"""User ops of the random plans."""

import torch
from torch import Tensor


def gated(x: Tensor, y: Tensor, cap: float) -> Tensor:
    """tanh(x / cap) · y, elementwise."""
    return torch.tanh(x / cap) * y


def unit(x: Tensor, g: Tensor) -> Tensor:
    """x / √(1 + |x|²) · g, of the last dim."""
    return x * (x.square().sum(-1, keepdim=True) + 1).rsqrt() * g
