"""Optimizers as plans name them, made as torch's fused ones over flat slices.

Non-goals: no update rule is written here.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Group:
    """Parameters, by patterns such as `layers.*.wq`, that share a weight decay and a factor on the learning rate."""

    def __init__(self, *patterns: str, weight_decay: float = 0.0, lr_scale: float = 1.0) -> None:
        self.patterns = patterns
        self.weight_decay = weight_decay
        self.lr_scale = lr_scale


class OptimizerSpec(Protocol):
    """What the state engine needs of an optimizer: its per-element state, and torch's own object."""

    @property
    def slots(self) -> tuple[str, ...]: ...

    def build(self, updates: list[tuple[Group, nn.Parameter]]) -> Optimizer: ...


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (arXiv:1711.05101)."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of its per-element state."""
        return ("exp_avg", "exp_avg_sq")

    def build(self, updates: list[tuple[Group, nn.Parameter]]) -> Optimizer:
        """torch's fused AdamW, a parameter group for each of ours."""
        return torch.optim.AdamW(_torch_groups(updates), betas=self.betas, eps=self.eps, fused=True)


@dataclass(frozen=True)
class SGD:
    """Gradient descent with momentum, as torch defines it (no dampening); weight decay adds to the gradient."""

    momentum: float = 0.0

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of its per-element state."""
        return ("momentum_buffer",) if self.momentum else ()

    def build(self, updates: list[tuple[Group, nn.Parameter]]) -> Optimizer:
        """torch's fused SGD, a parameter group for each of ours."""
        return torch.optim.SGD(_torch_groups(updates), momentum=self.momentum, fused=True)


def _torch_groups(updates: list[tuple[Group, nn.Parameter]]) -> list[dict[str, object]]:
    return [
        {"params": [parameter], "weight_decay": group.weight_decay, "lr_scale": group.lr_scale}
        for group, parameter in updates
    ]


def step(optimizer: Optimizer, lr: float, skip: Tensor) -> None:
    """One update at this learning rate; where `skip` (0-dim bool) holds, nothing changes, not even the step count."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
    # The fused kernels read this on the device: no host sync decides.
    optimizer.found_inf = skip.float()  # pyright: ignore[reportAttributeAccessIssue]
    optimizer.step()
