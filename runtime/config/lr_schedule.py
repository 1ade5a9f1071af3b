"""Learning rate schedules: pure functions of the step, so that a resumed run continues exactly."""

from dataclasses import dataclass
from math import cos, pi
from typing import Protocol


class Schedule(Protocol):
    """A learning rate for each step."""

    def lr(self, step: int, steps: int, peak: float) -> float: ...


@dataclass(frozen=True)
class Constant:
    """Linear warm-up over `warmup` steps, then the peak."""

    warmup: int = 0

    def lr(self, step: int, steps: int, peak: float) -> float:
        """The learning rate of step `step` (from 0) of `steps`."""
        return peak * min(1.0, (step + 1) / max(1, self.warmup))


@dataclass(frozen=True)
class Cosine:
    """Linear warm-up over `warmup` steps, then half a cosine; the last step's learning rate is `floor`.

    (arXiv:1608.03983.)
    """

    warmup: int = 0
    floor: float = 0.0

    def lr(self, step: int, steps: int, peak: float) -> float:
        """The learning rate of step `step` (from 0) of `steps`."""
        if step < self.warmup:
            return peak * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, steps - 1 - self.warmup)
        floor = min(self.floor, peak)
        return floor + (peak - floor) * 0.5 * (1 + cos(pi * done))
