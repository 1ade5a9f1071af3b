"""The loss scale of a model that computes in float16: as large as it can be without gradients that overflow.

The gradient of the loss is multiplied by it, so that gradients too small for float16 are not lost; the norm and the
update divide by it.  It is halved after an overflow and doubled after `INTERVAL` steps without one, so that it stays a
power of two, which rounds nothing (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).

Non-goals: whether a gradient has overflowed (the norm says so), and what is then skipped (`engine`).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

FIRST = 2.0**16
MOST = 2.0**24  # where no gradient ever overflows, because all are 0, it would grow to infinity
INTERVAL = 2000

VALUE, STEPS = "optimizer/loss_scale", "optimizer/loss_scale_steps"
"""The keys of what it keeps: the scale, and the steps since it last changed."""


class LossScale:
    """A loss scale that adapts itself, on the device: no host sync decides."""

    def __init__(self, device: torch.device) -> None:
        self._value = torch.full((), FIRST, device=device)
        self._steps = torch.zeros((), device=device)

    def value(self) -> Tensor:
        """The loss scale of this step: a copy, which `update` does not change."""
        return self._value.clone()

    def update(self, overflow: Tensor, skip: Tensor) -> None:
        """After a step in which a gradient overflowed or not (0-dim bool); nothing where `skip` (likewise) holds."""
        self._steps += ~skip
        halved = overflow & ~skip
        grown = (self._steps == INTERVAL) & ~halved
        self._value.mul_(torch.where(halved, 0.5, torch.where(grown, 2.0, 1.0))).clamp_(max=MOST)
        self._steps.masked_fill_(halved | grown, 0)

    def kept(self) -> Iterator[tuple[str, Tensor]]:
        """The state that checkpoints save, by key: its own memory."""
        yield VALUE, self._value
        yield STEPS, self._steps
