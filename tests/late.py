"""A process group that is late: what it gathers or sums is there when it is waited for, and until then there is NaN.

Purpose: gloo is so quick on small tensors that a wait which is missing goes unseen.  Here every result comes late, what
is sent must not change meanwhile, memory that is freed or new holds NaN, and none is freed under a collective.  Time is
counted, not passed: a collective takes `latency` on a link that serves one after another.

Non-goals: order and contents of collectives, which the real group inside sees to.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from scalec.runtime import Axis, working


@dataclass(eq=False)
class Link:
    """What all late groups of a rank share: time, what is under way, and what was begun and waited for, in order."""

    latency: float = 1.0
    now: float = 0.0
    busy: float = 0.0
    under_way: list["_Late"] = field(default_factory=list["_Late"])
    events: list[tuple[str, str, int]] = field(default_factory=list[tuple[str, str, int]])
    begun: int = 0

    def computes(self, time: float) -> None:
        """The model is at work."""
        self.now += time

    def late(self, axis: Axis) -> Axis:
        """The axis, its group late."""
        return replace(axis, group=LateGroup(axis.group, self)) if axis.size > 1 else axis

    def poison(self) -> None:
        """From here on memory of weights holds NaN when it is new and when it is freed.  For this process' life."""
        reserve, release = working.reserve, working.release

        def poisoned(x: Tensor) -> None:
            reserve(x)
            x.fill_(torch.nan)

        def released(x: Tensor) -> None:
            assert not any(_shares(x, late.output) for late in self.under_way), "memory is freed under a collective"
            if x.untyped_storage().nbytes():
                x.fill_(torch.nan)
            release(x)

        working.reserve, working.release = poisoned, released


@dataclass(eq=False)
class _Late:
    """A collective under way: its result is known, but not yet where it belongs."""

    link: Link
    name: str
    number: int
    output: Tensor
    result: Tensor
    due: float
    sent: Tensor | None = None  # apart from the output; it must not change
    copy: Tensor | None = None

    def wait(self) -> None:
        """It is done."""
        assert self in self.link.under_way, "waited for twice"
        self.link.under_way.remove(self)
        self.link.now = max(self.link.now, self.due)
        self.link.events.append(("wait", self.name, self.number))
        assert self.sent is None or self.copy is None or torch.equal(self.sent, self.copy), (
            "what is sent has changed on its way"
        )
        self.output.copy_(self.result)


class LateGroup:
    """Takes the place of a process group in an `Axis`."""

    def __init__(self, group: Any, link: Link) -> None:
        self._group, self._link = group, link

    def _allgather_base(self, output: Tensor, part: Tensor) -> _Late:
        return self._begun("gather", output, part, self._group._allgather_base)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor) -> _Late:
        return self._begun("scatter", output, whole, self._group._reduce_scatter_base)

    def allreduce(self, tensors: list[Tensor]) -> _Late:
        (x,) = tensors
        return self._begun("sum", x, x, lambda output, sent: self._group.allreduce([output.copy_(sent)]))

    def _begun(self, name: str, output: Tensor, sent: Tensor, call: Callable[[Tensor, Tensor], Any]) -> _Late:
        link, result, copy = self._link, torch.empty_like(output), sent.clone()
        call(result, copy.clone()).wait()
        output.fill_(torch.nan)
        link.busy = max(link.now, link.busy) + link.latency
        late = _Late(link, name, link.begun, output, result, link.busy)
        if _shares(output, sent):
            sent.fill_(torch.nan)  # what is scattered in place is worth nothing from here on
        else:
            late.sent, late.copy = sent, copy
        link.begun += 1
        link.events.append(("begin", name, late.number))
        link.under_way.append(late)
        return late


def _shares(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage()._cdata == y.untyped_storage()._cdata
