"""Optimizers as plans name them: torch's fused kernels on flat slices.  `kernels.AdamW` does the
same in one pass.

The kernels are called as torch.optim calls them, which itself imports torch._dynamo: seconds of
each rank's start.

Non-goals: no update rule is written here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

_fused_adamw: Callable[..., None] = cast(Any, torch)._fused_adamw_
_fused_sgd: Callable[..., None] = cast(Any, torch)._fused_sgd_


class ParamGroup:
    """Parameters, by patterns such as `layers.*.wq`, that share a weight decay and a factor on the
    learning rate.

    A tuple has the patterns of weights that form one product (`fused_linear`), in its order: in
    each layer of a repeat these lie side by side.
    """

    def __init__(
        self, *patterns: str | tuple[str, ...], weight_decay: float = 0.0, lr_scale: float = 1.0
    ) -> None:
        products = list[tuple[str, ...]]()
        for pattern in patterns:
            products.append(pattern if isinstance(pattern, tuple) else (pattern,))
        self.patterns = tuple(products)
        self.weight_decay = weight_decay
        self.lr_scale = lr_scale


@dataclass(frozen=True, slots=True)
class Part:
    """A group's part of a bucket: its parameters, their gradients and slots, [layers, elements]
    each.

    `copies`, in the same shape, are what the model computes with, where it does not compute with
    the parameters' own memory.
    """

    group: ParamGroup
    parameters: Tensor
    gradients: Tensor
    slots: Mapping[str, Tensor]
    copies: Tensor | None = None

    def pieces(self, most: int) -> Iterator["Part"]:
        """Parts of it, of `most` elements or a little more."""
        layers, size = self.parameters.shape
        length = max(1, most // layers)
        for start in range(0, size, length):
            columns = slice(start, start + length)
            slots = {slot: value[:, columns] for slot, value in self.slots.items()}
            copies = None if self.copies is None else self.copies[:, columns]
            yield Part(
                self.group, self.parameters[:, columns], self.gradients[:, columns], slots, copies
            )

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that an update may change, by name."""
        tensors = {"parameter": self.parameters, "gradient": self.gradients, **self.slots}
        if self.copies is not None:
            tensors["working copy"] = self.copies
        return tensors

    def scale(self, scale: Tensor | None) -> None:
        """Multiplies the gradients, if there is a scale."""
        if scale is not None:
            self.gradients.mul_(scale)

    def refresh(self) -> None:
        """Brings the copies up to date with the parameters."""
        if self.copies is not None:
            self.copies.copy_(self.parameters)


class Optimizer(Protocol):
    """The interface of an optimizer for the state engine: the names of its per-element state, and
    its step.

    `update` number `step` (from 1) changes parameters, slots and copies in place by the gradients
    times `scale`, and may write to the gradients; where `skip` is 1 it changes nothing else.
    `step`, `skip` and `scale` are 0-dim; step and skip are float32.
    """

    @property
    def slots(self) -> tuple[str, ...]: ...

    def update(
        self, part: Part, lr: float, step: Tensor, skip: Tensor, scale: Tensor | None = None
    ) -> None: ...


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (arXiv:1711.05101)."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of its per-element state."""
        return ("exp_avg", "exp_avg_sq")

    def update(
        self, part: Part, lr: float, step: Tensor, skip: Tensor, scale: Tensor | None = None
    ) -> None:
        """One update in place."""
        part.scale(scale)
        _fused_adamw(
            part.parameters.unbind(),
            part.gradients.unbind(),
            part.slots["exp_avg"].unbind(),
            part.slots["exp_avg_sq"].unbind(),
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
        part.refresh()


@dataclass(frozen=True)
class SGD:
    """Gradient descent with momentum, as torch defines it (no dampening); weight decay adds to
    the gradient.
    """

    momentum: float = 0.0

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of its per-element state."""
        return ("momentum_buffer",) if self.momentum else ()

    def update(
        self, part: Part, lr: float, step: Tensor, skip: Tensor, scale: Tensor | None = None
    ) -> None:
        """One update in place, whatever its number."""
        part.scale(scale)
        momenta: Sequence[Tensor] = []
        if self.momentum:
            momenta = part.slots["momentum_buffer"].unbind()
        _fused_sgd(
            part.parameters.unbind(),
            part.gradients.unbind(),
            momenta,
            weight_decay=part.group.weight_decay,
            momentum=self.momentum,
            lr=lr * part.group.lr_scale,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,  # without dampening a momentum of zeros says the same
            found_inf=skip,
        )
        part.refresh()
