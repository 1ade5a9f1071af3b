"""Updates are held from a step on whose values are not as they should be: the state remains that of before it.

A rank's host learns of such a step some steps later, without waiting for the device; until then nothing may change.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

ROW = "optimizer/skipped_in_a_row"
"""The key of what it keeps: how many steps before this one have been skipped."""


class Held:
    """Counts such steps in a row on the device, where no host sync decides; all ranks hold the same."""

    def __init__(self, device: torch.device) -> None:
        self._row = torch.zeros((), dtype=torch.float64, device=device)  # checkpoints have no integers
        self._most = 0
        self.paused = False
        """Whether nothing changes for now, without being counted: a step is tried out."""

    def allow(self, most: int) -> None:
        """So many in a row are skipped, each by itself, and only more hold what follows."""
        self._most = most

    def after(self, finite: Tensor) -> Tensor:
        """Whether a step changes nothing (0-dim bool), given whether it is finite, and no spike (likewise)."""
        if self.paused:
            return self.holds()
        self._row.copy_(torch.where(finite & ~self.holds(), 0, self._row + 1))
        return self._row > 0

    def row(self) -> Tensor:
        """How many steps in a row were skipped (0-dim float64); once updates are held, all after them count."""
        return self._row

    def kept(self) -> Iterator[tuple[str, Tensor]]:
        """The state that checkpoints save, by key: its own memory."""
        yield ROW, self._row

    def holds(self) -> Tensor:
        """Whether nothing changes any more."""
        return torch.ones_like(self._row, dtype=torch.bool) if self.paused else self._row > self._most
