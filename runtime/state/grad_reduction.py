"""Reductions of flat gradients, which go on while backward does.

Non-goals: when a gradient is complete (`flat_param_group`), what becomes of it (`optimizers`).
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..comm import c10d
from ..comm.mesh import Axis

Accumulate = Callable[[Tensor, Tensor], object]
"""Adds to the first tensor the second, which may have a narrower element type: torch's `add_`,
or a kernel.
"""


@dataclass(frozen=True, eq=False, slots=True)
class _Reduction:
    """A reduction in flight: `shard`, this rank's part of the sent tensor, becomes the sum, and is
    passed to `keep`.
    """

    shard: Tensor
    keep: Callable[[Tensor], None]
    work: Any
    add: Axis | None
    line: Any

    def finish(self) -> None:
        """Waits for the sum."""
        if self.work is not None:
            self.work.wait()
        if self.add is not None and self.add.size > 1:
            self.add.show_to_watch(self.shard, "result in backward", self.line)
        self.keep(self.shard)


class Reductions:
    """The reductions in flight of a bucket's layers, in the order that they began: the same on all
    ranks.
    """

    def __init__(self, device: torch.device) -> None:
        self._under_way: list[_Reduction] = []
        self._aside = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(
        self,
        sent: Tensor,
        shard: slice,
        scatter: Axis | None,
        add: Axis | None,
        keep: Callable[[Tensor], None],
        line: Any,
    ) -> None:
        """Begins to sum a gradient, complete on this rank: its part `shard` over `scatter`, then
        over `add`.
        """
        part, work = sent[shard], None
        with self._beside():
            if scatter is not None and scatter.size > 1:
                work = c10d.begin_reduce_scatter(part, sent, scatter.group)
            if add is not None and add.size > 1:
                if work is not None:
                    _wait_for_scatter(work)
                work = c10d.begin_all_reduce(part, add.group)
        self._under_way.append(_Reduction(part, keep, work, add, line))

    def make_room(self) -> None:
        """Waits, so that per bucket at most one reduction with memory of its own is in flight
        during backward.
        """
        self.finish()

    def finish(self) -> None:
        """Waits for all."""
        for reduction in self._under_way:
            reduction.finish()
        self._under_way.clear()

    @contextmanager
    def _beside(self) -> Generator[None]:
        """On CUDA, a stream of its own: a sum that waits for another sum does not hold up the
        model.
        """
        if self._aside is None:
            yield
            return
        self._aside.wait_stream(torch.cuda.current_stream(self._aside.device))
        with cast(Any, torch.cuda).stream(self._aside):
            yield


def _wait_for_scatter(work: Any) -> None:
    """Waits for the ranks' parts, which the next sum reads."""
    work.wait()
