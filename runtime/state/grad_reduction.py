"""A turn's gradient: what backward adds up, and its reductions, which go on while backward does.

Non-goals: when a turn's gradient is complete (`flows`), what becomes of it (`optimizers`).
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..comm.mesh import Axis
from .layout import Layout

Accumulate = Callable[[Tensor, Tensor], object]
"""Adds to the first tensor the second, which may have a narrower element type: torch's `add_`, or a kernel."""


class Gradient:
    """The gradient of record, `kept`: of the whole turn or, if it is `by_parts`, of this rank's part.

    Backward adds to `whole()`.  By parts, that is memory for one microbatch alone: what the ranks' sum of it has for
    this rank is added to `kept`.
    """

    def __init__(
        self, kept: Tensor, layout: Layout, by_parts: bool, reductions: "Reductions", accumulate: Accumulate
    ) -> None:
        self.kept, self.own, self.by_parts, self.reductions = kept, layout.own, by_parts, reductions
        self.accumulate = accumulate
        self.left = 0  # microbatches whose backward has not come by
        self._size = layout.size
        self._passing: Tensor | None = None

    def part(self) -> Tensor:
        """This rank's part of the gradient of record."""
        return self.kept if self.by_parts else self.kept[self.own]

    def whole(self) -> Tensor:
        """What backward adds to; it begins with zeros, and where it does not stay, it is made when first asked for."""
        if not self.by_parts:
            return self.kept
        if self._passing is None:
            self._passing = self.kept.new_zeros(self._size)
        return self._passing

    def taken(self) -> Tensor:
        """`whole()`, which is complete; what is added from here on is another microbatch's."""
        whole, self._passing = self.whole(), None
        return whole

    def begin(self, microbatches: int) -> None:
        """Begins a step; what a backward that was not finished has left is dropped."""
        self.left, self._passing = microbatches, None


def accumulate_into(gradient: Gradient, view: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
    """A hook that adds a parameter's gradient to its `view` of the whole, which may be wider, and frees it."""

    def hook(parameter: Tensor) -> None:
        if parameter.grad is None:
            return  # `deferred`: backward comes by, and makes the gradient later
        gradient.accumulate(view(gradient.whole()), parameter.grad)
        parameter.grad = None

    return hook


@dataclass(frozen=True, eq=False, slots=True)
class _Reduction:
    """One under way: this rank's part of `sent`, the whole gradient as it is sent, becomes the sum."""

    gradient: Gradient
    sent: Tensor
    work: Any
    add: Axis | None
    line: Any

    def finish(self) -> None:
        """Waits for the sum, and puts it where the gradient of record is, if that is elsewhere."""
        if self.work is not None:
            self.work.wait()
        part, kept = self.sent[self.gradient.own], self.gradient.part()
        if self.add is not None and self.add.watch is not None and self.add.size > 1:
            self.add.watch.coerced(part, self.add, self.line, "result again")
        if self.gradient.by_parts:
            self.gradient.accumulate(kept, part)
        elif part.dtype != kept.dtype:
            kept.copy_(part)


class Reductions:
    """Those under way of a bucket's turns, in the order in which they were begun: the same on all ranks."""

    def __init__(self, device: torch.device) -> None:
        self._under_way: list[_Reduction] = []
        self._aside = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(
        self, gradient: Gradient, scatter: Axis | None, add: Axis | None, dtype: torch.dtype | None, line: Any
    ) -> None:
        """Begins to sum a turn's gradient, complete on this rank: for each its part over `scatter`, then over `add`.

        What is sent has this `dtype`, if given.
        """
        if gradient.by_parts or dtype not in (None, gradient.kept.dtype):
            self._make_room()
        whole = gradient.taken()
        sent = whole.to(dtype or whole.dtype)
        part, work = sent[gradient.own], None
        with self._beside():
            if scatter is not None and scatter.size > 1:
                work = scatter.group._reduce_scatter_base(part, sent)
            if add is not None and add.size > 1:
                if work is not None:
                    _scattered(work)
                work = add.group.allreduce([part])
        self._under_way.append(_Reduction(gradient, sent, work, add, line))

    def _make_room(self) -> None:
        """Of each bucket one sum in memory of its own is under way at most, while backward makes the next gradient."""
        self.finish()

    def finish(self) -> None:
        """Waits for all."""
        for each in self._under_way:
            each.finish()
        self._under_way.clear()

    @contextmanager
    def _beside(self) -> Generator[None]:
        """On CUDA a stream of its own, so that a sum which waits for another's end does not hold up the model."""
        if self._aside is None:
            yield
            return
        self._aside.wait_stream(torch.cuda.current_stream(self._aside.device))
        with cast(Any, torch.cuda).stream(self._aside):
            yield


def _scattered(work: Any) -> None:
    """Waits for the ranks' parts, which the next sum reads."""
    work.wait()
