"""Steps of SGD on clipped gradients in one process of plain torch."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

CLIP = 1.0


def sgd_steps(
    loss_of: Callable[..., Tensor],
    start: dict[str, Tensor],
    batches: Sequence[tuple[Tensor, ...]],
    lr: float,
) -> list[Any]:
    """The loss, norm, gradients and parameters of each step; `loss_of` takes the parameters and
    a batch.
    """
    p = {name: value.clone().requires_grad_() for name, value in start.items()}
    steps = list[Any]()
    for batch in batches:
        loss = loss_of(p, *batch)
        gradients = dict(zip(p, torch.autograd.grad(loss, list(p.values())), strict=True))
        norm = (
            torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
        )
        scale = min(1.0, CLIP / float(norm))
        with torch.no_grad():
            for name, value in p.items():
                value -= lr * scale * gradients[name]
        after = {name: value.detach().clone() for name, value in p.items()}
        steps.append(
            SimpleNamespace(
                loss=loss.item(), norm=float(norm), gradients=gradients, parameters=after
            )
        )
    return steps
