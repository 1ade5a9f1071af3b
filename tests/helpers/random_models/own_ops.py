"""User ops of the random plans."""

import torch
from torch import Tensor


def gated(x: Tensor, y: Tensor, cap: float) -> Tensor:
    """tanh(x / cap) · y, elementwise."""
    return torch.tanh(x / cap) * y


def unit(x: Tensor, g: Tensor) -> Tensor:
    """x / √(1 + |x|²) · g, of the last dim."""
    return x * (x.square().sum(-1, keepdim=True) + 1).rsqrt() * g


def parted(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x · cos y, and the mean of sin x · y over the last dim."""
    return x * y.cos(), (x.sin() * y).mean(-1)


def placed(x: Tensor, at: Tensor) -> Tensor:
    """x plus its place."""
    return x + at.to(x.dtype)[:, None]
