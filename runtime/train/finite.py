"""Each rank's check that a step's loss and gradient norm were finite and usual, which does not wait
for the device.

Where they were not, the `finite` of the step's update has let neither this step nor any after it
change anything.  A rank reads a step's metrics when the next step has been handed to the device; on
the CPU, where they are there already, at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ..config.plan import Metrics
from ..errors import RunError
from ..state.engine import TrainState


@dataclass(frozen=True)
class Bad:
    """A step whose values were not finite, or whose loss was a spike: above `limit`.

    It is the last of `row` steps in a row that were skipped; `row` is 0 if it was not skipped.
    """

    step: int
    loss: float
    norm: float
    row: int
    limit: float

    @property
    def is_spike(self) -> bool:
        """Whether the loss is finite and above its limit."""
        return isfinite(self.loss) and self.loss > self.limit

    def __str__(self) -> str:
        if self.is_spike:
            return f"step {self.step}: loss {self.loss:.4f} is a spike: above {self.limit:.4f}"
        return f"step {self.step}: loss {self.loss}, gradient norm {self.norm}"


@dataclass(frozen=True)
class _Due:
    """A step's loss, norm, tokens, loss scale, steps skipped in a row and limit, on their way
    to the host.
    """

    step: int
    values: Tensor
    copied: torch.cuda.Event | None

    def read(self) -> list[float]:
        if self.copied is not None:
            self.copied.synchronize()
        values: Any = self.values
        return values.tolist()


class Finite:
    """Looks every `every` steps; `skips` steps in a row may be skipped; `located` says more about a
    step's values.

    All ranks read the same values, and so do the same after the same step.
    """

    def __init__(
        self,
        state: TrainState,
        every: int = 1,
        skips: int = 0,
        located: Callable[[int], str] | None = None,
    ) -> None:
        self._held, self._every, self._skips, self._located = state.hold, every, skips, located
        self._held.allow(skips)
        self._due: _Due | None = None

    def after(self, step: int, metrics: Metrics) -> Bad | None:
        """Takes note of a step that has been handed to the device.

        Returns as `settle` does, for the step before it; on the CPU for this step.
        """
        bad = self.settle()
        if step % self._every == 0:
            self._due = self._begin_copy(step, metrics)
            if self._due.copied is None:
                bad = self.settle()
        return bad

    def settle(self) -> Bad | None:
        """The step that is read now, if it was skipped or a spike.

        RunError on all ranks if no more may be skipped.
        """
        if self._due is None:
            return None
        due, self._due = self._due, None
        loss, norm, tokens, scale, row, limit = due.read()
        bad = Bad(due.step - max(0, int(row) - 1 - self._skips), loss, norm, int(row), limit)
        # a scale below 1 would not have helped
        finite = isfinite(loss) and (isfinite(norm) or scale >= 1)
        if row > self._skips or (tokens and not finite and not row):
            raise RunError(f"{bad}; {self._why(bad)}")
        return bad if row or (tokens and bad.is_spike) else None

    def _why(self, bad: Bad) -> str:
        skipped = f"{self._skips} in a row were skipped; " if self._skips else ""
        place = ""
        if self._located and bad.row and not bad.is_spike:
            place = f"; {self._located(bad.step)}"
        return f"{skipped}no parameter has been updated by it; try a lower --lr{place}"

    def _begin_copy(self, step: int, metrics: Metrics) -> _Due:
        """Begins to copy a step's metrics to the host; scale 0 is none."""
        loss, zero = metrics.loss, torch.zeros_like(metrics.loss)
        limit = torch.full_like(loss, torch.inf) if metrics.limit is None else metrics.limit
        norm = zero if metrics.norm is None else metrics.norm
        scale = zero if metrics.loss_scale is None else metrics.loss_scale
        scalars = (loss, norm, metrics.tokens, scale, self._held.row(), limit)
        values = torch.stack([scalar.double() for scalar in scalars])
        if not loss.is_cuda:
            return _Due(step, values, None)
        values, copied = values.to("cpu", non_blocking=True), torch.cuda.Event()
        copied.record()
        return _Due(step, values, copied)
