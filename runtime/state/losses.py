"""The losses of the last steps, on the device, and the most that the next may be without being a spike.

The median of the losses, and the median of their distances from it (Hampel 1974): a loss that is above the first by
more than a multiple of the second is a spike.  No single loss can upset the rule, and no host sync decides.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

WINDOW = 64
LEAST = 16
"""The most losses that are kept, and the fewest by which a loss is a spike."""
_NOISE = 1e-3  # of the median: less is no spike, however calm the losses before it were

LAST, COUNT = "optimizer/losses", "optimizer/losses_seen"
"""The keys of what it keeps: the losses, and how many there have been."""


class Losses:
    """A window of losses; a spike does not enter it.  All ranks hold the same."""

    def __init__(self, device: torch.device) -> None:
        self._last = torch.zeros(WINDOW, device=device)
        self._count = torch.zeros((), device=device)  # float32: checkpoints have no integers

    def limit(self, deviations: float) -> Tensor:
        """The largest loss that is no spike (0-dim float32): infinity while there are few."""
        held = self._count.clamp(max=WINDOW)
        losses = torch.where(self._places() < held, self._last, torch.inf)
        middle = _median(losses, held)
        spread = torch.maximum(_median((losses - middle).abs(), held), _NOISE * middle.abs())
        return torch.where(held < LEAST, torch.inf, middle + deviations * spread)

    def add(self, loss: Tensor, counts: Tensor) -> None:
        """A step's loss (0-dim), unless it is not finite or does not count (0-dim bool)."""
        counts = counts & loss.isfinite()
        here = counts & (self._places() == self._count % WINDOW)
        self._last.copy_(torch.where(here, loss, self._last))
        self._count += counts

    def _places(self) -> Tensor:
        return torch.arange(WINDOW, device=self._last.device)

    def kept(self) -> Iterator[tuple[str, Tensor]]:
        """The state that checkpoints save, by key: its own memory."""
        yield LAST, self._last
        yield COUNT, self._count


def _median(values: Tensor, count: Tensor) -> Tensor:
    """The median of the `count` (0-dim) smallest values."""
    ordered, number = values.sort().values, count.long()
    return torch.stack([ordered.take((number - 1).clamp(min=0) // 2), ordered.take(number // 2)]).mean()
