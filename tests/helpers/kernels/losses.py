"""Losses by plain torch in float64, and the kernels' losses of several ranks, one after the
other in one process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from helpers.kernels.cases import Precision, check_equal
from helpers.reference_ops import cross_entropy
from scalec.runtime import Axis, token_loss
from scalec.runtime.kernels import rescale_to_global_max

FACTOR = 3.0
"""The factor of a loss before its gradient is taken."""


@dataclass(frozen=True)
class Loss:
    """The operands of cross entropy: `classes` of the vocabulary are no padding, None for all."""

    classes: int | None = None
    smoothing: float = 0.0
    z: float = 0.0
    cap: float = 0.0

    def of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """By its definition, of whole rows."""
        real = logits[..., : self.classes]
        return cross_entropy(real, labels, self.smoothing, self.z, self.cap)

    @property
    def of_parts(self) -> dict[str, Any]:
        """The arguments of `LogitSoftmaxStats` and `LinearSoftmaxStats`."""
        return {"classes": self.classes, "smoothing": self.smoothing, "cap": self.cap}

    @property
    def of_whole(self) -> dict[str, Any]:
        """The arguments of `CrossEntropy` and `LinearCrossEntropy`."""
        return {**self.of_parts, "z": self.z}


PLAIN = Loss()
LOSSES = (
    PLAIN,
    Loss(smoothing=0.1),
    Loss(z=0.01),
    Loss(cap=5.0),
    Loss(smoothing=0.1, z=0.01, cap=5.0),
)


def ranks(size: int) -> list[Axis]:
    """An axis as each of its ranks sees it."""
    return [Axis("tp", size, rank, None) for rank in range(size)]


def joined(
    parts: Callable[[Axis], tuple[Tensor, Tensor, Tensor]],
    labels: Tensor,
    columns: int,
    world: int,
    loss: Loss,
) -> Tensor:
    """The loss from the parts of all ranks, each with so many columns, joined as collectives
    would.
    """
    every = [(axis, parts(axis)) for axis in ranks(world)]
    peak = torch.stack([m for _, (m, _, _) in every]).amax(0)
    of_ranks = [
        rescale_to_global_max(
            m,
            z,
            t,
            peak,
            labels,
            axis,
            columns=columns,
            classes=loss.classes,
            smoothing=loss.smoothing,
        )
        for axis, (m, z, t) in every
    ]
    z, t = (torch.stack(it).sum(0) for it in zip(*of_ranks, strict=True))
    return token_loss(z, t, labels, peak if loss.z else None, loss.z)


def check_loss(
    actual: Callable[..., Tensor],
    expected: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    precision: Precision,
) -> None:
    """Holds a loss and its gradients against plain torch in float64, of the same tensors."""
    wide = [tensor.detach().to("cpu", torch.float64).requires_grad_() for tensor in tensors]
    loss, right = actual(*tensors), expected(*wide)
    check_equal(loss, right, precision._replace(dtype=loss.dtype))
    gradients = torch.autograd.grad(FACTOR * loss, list(tensors))
    for one, other in zip(gradients, torch.autograd.grad(FACTOR * right, wide), strict=True):
        check_equal(one, other, precision)


def labels_of(shape: Sequence[int], classes: int, device: str, seed: int = 5) -> Tensor:
    """Any classes, and every third token without."""
    labels = torch.randint(classes, tuple(shape), generator=torch.Generator().manual_seed(seed))
    labels.view(-1)[1::3] = -1
    labels.view(-1)[4::6] = -100
    return labels.to(device)
