"""Which tensors autograd keeps of a call."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def saved_by(call: Callable[[], Any]) -> list[Tensor]:
    """The tensors saved for backward, in order."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        call()
    return saved
