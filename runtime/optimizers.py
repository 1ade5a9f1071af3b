"""Optimizers as plans name them: torch's fused kernels on flat slices.

The kernels are called as torch.optim calls them, which itself imports torch._dynamo: seconds of each rank's start.

Non-goals: no update rule is written here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

_fused_adamw: Callable[..., None] = cast(Any, torch)._fused_adamw_
_fused_sgd: Callable[..., None] = cast(Any, torch)._fused_sgd_


class Group:
    """Parameters, by patterns such as `layers.*.wq`, that share a weight decay and a factor on the learning rate."""

    def __init__(self, *patterns: str, weight_decay: float = 0.0, lr_scale: float = 1.0) -> None:
        self.patterns = patterns
        self.weight_decay = weight_decay
        self.lr_scale = lr_scale


@dataclass(frozen=True, slots=True)
class Part:
    """A group's part of a bucket: flat slices of its parameters, gradients and slots, for each turn of a repeat."""

    group: Group
    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]
    slots: Mapping[str, Sequence[Tensor]]


class Optimizer(Protocol):
    """What the state engine needs of an optimizer: the names of its per-element state, and its step."""

    @property
    def slots(self) -> tuple[str, ...]: ...

    def update(self, part: Part, lr: float, step: Tensor, skip: Tensor) -> None: ...


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (arXiv:1711.05101)."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of its per-element state."""
        return ("exp_avg", "exp_avg_sq")

    def update(self, part: Part, lr: float, step: Tensor, skip: Tensor) -> None:
        """Update number `step` (from 1; float32, 0-dim) in place, or nothing where `skip` (likewise) is 1."""
        _fused_adamw(
            part.parameters,
            part.gradients,
            part.slots["exp_avg"],
            part.slots["exp_avg_sq"],
            [],
            [step] * len(part.parameters),
            lr=lr * part.group.lr_scale,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=part.group.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            found_inf=skip,
        )


@dataclass(frozen=True)
class SGD:
    """Gradient descent with momentum, as torch defines it (no dampening); weight decay adds to the gradient."""

    momentum: float = 0.0

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of its per-element state."""
        return ("momentum_buffer",) if self.momentum else ()

    def update(self, part: Part, lr: float, step: Tensor, skip: Tensor) -> None:
        """One update in place, whatever its number, or nothing where `skip` (float32, 0-dim) is 1."""
        _fused_sgd(
            part.parameters,
            part.gradients,
            part.slots.get("momentum_buffer", []),
            weight_decay=part.group.weight_decay,
            momentum=self.momentum,
            lr=lr * part.group.lr_scale,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,  # without dampening a momentum of zeros says the same
            found_inf=skip,
        )
