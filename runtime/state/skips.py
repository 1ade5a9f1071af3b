"""The state that makes steps change nothing, or less: an adapting loss scale, held updates, a limit
for losses.

All of it is on the device, where no host sync decides, and the same on all ranks.  `kept` gives it
to checkpoints, by key, as its own memory; KEYS are these keys.

Non-goals: whether a gradient has overflowed (the norm says so), and what is then skipped
(`engine`).
"""

from collections.abc import Iterator

import torch
from torch import Tensor


class LossScale:
    """The loss scale of a model in float16: as large as it can be without gradients that overflow.

    The gradient of the loss is multiplied by it, so that gradients too small for float16 are not
    lost; the norm and the update divide by it.  It is halved after an overflow and doubled after
    `INTERVAL` steps without one, so that it stays a power of two, which rounds nothing
    (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).
    """

    FIRST = 2.0**16
    MOST = 2.0**24  # where no gradient ever overflows, because all are 0, it would grow to infinity
    INTERVAL = 2000
    # the scale, and the steps since it last changed
    KEYS = "optimizer/loss_scale", "optimizer/loss_scale_steps"

    def __init__(self, device: torch.device) -> None:
        self._value = torch.full((), self.FIRST, device=device)
        self._steps = torch.zeros((), device=device)

    def value(self) -> Tensor:
        """The loss scale of this step: a copy, which `update` does not change."""
        return self._value.clone()

    def update(self, overflow: Tensor, skip: Tensor) -> None:
        """Adapts the scale after a step.  `overflow`: whether one of its gradients overflowed.
        Where `skip` is true nothing changes.  Both are 0-dim bools.
        """
        self._steps += ~skip
        halved = overflow & ~skip
        grown = (self._steps == self.INTERVAL) & ~halved
        self._value.mul_(torch.where(halved, 0.5, torch.where(grown, 2.0, 1.0))).clamp_(
            max=self.MOST
        )
        self._steps.masked_fill_(halved | grown, 0)

    def get_checkpoint_values(self) -> Iterator[tuple[str, Tensor]]:
        """The scale and its steps."""
        return zip(self.KEYS, (self._value, self._steps), strict=True)


class UpdateHold:
    """Counts the steps in a row whose values are not as they should be, after which updates may be
    held.

    The state then stays as it was before.  A rank's host learns of such a step some steps later,
    without waiting for the device; until then nothing may change.
    """

    KEYS = ("optimizer/skipped_in_a_row",)

    def __init__(self, device: torch.device) -> None:
        # checkpoints have no integers
        self._row = torch.zeros((), dtype=torch.float64, device=device)
        self._most = 0
        self.paused = False
        """Whether nothing changes for now, without being counted: a step is tried out."""

    def allow(self, most: int) -> None:
        """Lets `most` steps in a row be skipped, each by itself; only more hold the updates."""
        self._most = most

    def after(self, finite: Tensor) -> Tensor:
        """Whether a step changes nothing (0-dim bool); `finite`: whether its values are finite,
        and no spike (0-dim bool).
        """
        if self.paused:
            return self.holds()
        self._row.copy_(torch.where(finite & ~self.holds(), 0, self._row + 1))
        return self._row > 0

    def row(self) -> Tensor:
        """How many steps in a row were skipped (0-dim float64); once updates are held, all
        after them count.
        """
        return self._row

    def holds(self) -> Tensor:
        """Whether nothing changes any more."""
        if self.paused:
            return torch.ones_like(self._row, dtype=torch.bool)
        return self._row > self._most

    def get_checkpoint_values(self) -> Iterator[tuple[str, Tensor]]:
        """The number of steps."""
        return zip(self.KEYS, (self._row,), strict=True)


class Losses:
    """The losses of the last steps that count, and the limit above which the next one is a spike.

    The rule uses the median of the losses, and the median of their distances from it (Hampel 1974):
    a loss above the first by more than a multiple of the second is a spike.  No single loss can
    upset the rule.
    """

    WINDOW = 64
    LEAST = 16
    """The most losses that are kept, and the fewest by which a loss is a spike."""
    NOISE = 1e-3  # of the median: less is no spike, however calm the losses before it were
    KEYS = "optimizer/losses", "optimizer/losses_seen"  # the losses, and how many there have been

    def __init__(self, device: torch.device) -> None:
        self._last = torch.zeros(self.WINDOW, device=device)
        self._count = torch.zeros((), device=device)  # float32: checkpoints have no integers

    def limit(self, deviations: float) -> Tensor:
        """The largest loss that is no spike (0-dim float32): infinity while there are few."""
        count = self._count.clamp(max=self.WINDOW)
        losses = torch.where(self._places() < count, self._last, torch.inf)
        middle = _median(losses, count)
        spread = torch.maximum(_median((losses - middle).abs(), count), self.NOISE * middle.abs())
        return torch.where(count < self.LEAST, torch.inf, middle + deviations * spread)

    def add(self, loss: Tensor, counts: Tensor) -> None:
        """A step's loss (0-dim), unless it is not finite or does not count (0-dim bool)."""
        counts = counts & loss.isfinite()
        here = counts & (self._places() == self._count % self.WINDOW)
        self._last.copy_(torch.where(here, loss, self._last))
        self._count += counts

    def _places(self) -> Tensor:
        return torch.arange(self.WINDOW, device=self._last.device)

    def get_checkpoint_values(self) -> Iterator[tuple[str, Tensor]]:
        """The losses and their number."""
        return zip(self.KEYS, (self._last, self._count), strict=True)


def _median(values: Tensor, count: Tensor) -> Tensor:
    """The median of the `count` (0-dim) smallest values."""
    ordered, number = values.sort().values, count.long()
    return torch.stack(
        [ordered.take((number - 1).clamp(min=0) // 2), ordered.take(number // 2)]
    ).mean()
