"""Losses that are far above those before them, by a rule that no single loss can upset.

The median of the last losses, and the median of their distances from it (Hampel 1974): where the loss is above the
first by more than a multiple of the second, it is a spike.
"""

from collections import deque
from statistics import median

WINDOW = 64
LEAST = 16
"""Losses that are looked at, and so many that there must be."""
_NOISE = 1e-3  # of the median: less is no spike, however calm the losses before it were


class Spikes:
    """A window of losses; a spike does not enter it."""

    def __init__(self, deviations: float) -> None:
        self._deviations, self._losses = deviations, deque[float](maxlen=WINDOW)

    def after(self, step: int, loss: float) -> str:
        """A line about a step's loss that is a spike; "" where it is none."""
        if len(self._losses) >= LEAST:
            middle = median(self._losses)
            spread = max(median(abs(each - middle) for each in self._losses), _NOISE * abs(middle))
            if loss > middle + self._deviations * spread:
                times = (loss - middle) / spread
                return f"step {step}: loss {loss:.4f} is a spike: {times:.1f} deviations above {middle:.4f}"
        self._losses.append(loss)
        return ""
