"""A process group that is late: what it gathers, sums or receives is there when it is waited for,
until then NaN.

Purpose: gloo is so quick on small tensors that a wait which is missing goes unseen.  Here every
result comes late, what is sent must not change meanwhile, memory that is freed or new holds NaN,
and none is freed under a collective.  Time is counted, not passed: a collective takes `latency` on
a link that serves one after another.

Non-goals: order and contents of collectives, which the real group inside sees to.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from scalec.runtime import Axis
from scalec.runtime.state import flat_param


@dataclass(eq=False)
class Link:
    """The common state of a rank's late groups: time, what is under way, what was begun and
    waited for, in order.
    """

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
        """From here on memory of weights holds NaN when it is new and when it is freed.

        For this process' life.
        """
        reserve, release = flat_param.reserve, flat_param.release

        def poisoned(x: Tensor) -> None:
            reserve(x)
            x.fill_(torch.nan)

        def released(x: Tensor) -> None:
            assert not any(_shares(x, late.output) for late in self.under_way), (
                "memory is freed under a collective"
            )
            if x.untyped_storage().nbytes():
                x.fill_(torch.nan)
            release(x)

        flat_param.reserve, flat_param.release = poisoned, released


@dataclass(eq=False)
class _Late:
    """A collective under way: its result is known, but not yet where it belongs."""

    link: Link
    name: str
    number: int
    output: Tensor
    result: Tensor
    due: float
    sent: Callable[[], Tensor | None] = lambda: None  # apart from the output; it must not change
    copy: Tensor | None = None
    work: Any = None  # of a message, which is under way indeed

    def wait(self) -> None:
        """It is done."""
        assert self in self.link.under_way, "waited for twice"
        if self.work is not None:
            self.work.wait()
        self.link.under_way.remove(self)
        self.link.now = max(self.link.now, self.due)
        self.link.events.append(("wait", self.name, self.number))
        if self.copy is not None:
            assert (sent := self.sent()) is not None, "memory is freed under a message"
            assert torch.equal(sent, self.copy), "what is sent has changed on its way"
        self.output.copy_(self.result)


class LateGroup:
    """Takes the place of a process group in an `Axis`."""

    def __init__(self, group: Any, link: Link) -> None:
        self._group, self._link = group, link

    def _allgather_base(self, output: Tensor, part: Tensor, *_: Any) -> _Late:
        return self._begun("gather", output, part, self._group._allgather_base)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, *_: Any) -> _Late:
        return self._begun("scatter", output, whole, self._group._reduce_scatter_base)

    def allreduce(self, tensors: list[Tensor], *_: Any) -> _Late:
        (x,) = tensors
        return self._begun(
            "sum", x, x, lambda output, sent: self._group.allreduce([output.copy_(sent)])
        )

    def alltoall_base(
        self, output: Tensor, sent: Tensor, received: list[int], parts: list[int], *_: Any
    ) -> _Late:
        return self._begun(
            "exchange",
            output,
            sent,
            lambda *ends: self._group.alltoall_base(*ends, received, parts),
        )

    def _get_backend(self, device: torch.device) -> Any:
        return self._group._get_backend(device)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> _Late:
        (x,) = tensors
        copy, nothing = x.clone(), x.new_empty(0)
        late = self._added("send", nothing, nothing)
        late.sent, late.copy, late.work = weakref.ref(x), copy, self._group.send([copy], peer, tag)
        return late

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> _Late:
        (x,) = tensors
        late = self._added("receive", x, torch.empty_like(x))
        late.work = self._group.recv([late.result], peer, tag)
        x.fill_(torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).min)
        return late

    def _begun(
        self, name: str, output: Tensor, sent: Tensor, call: Callable[[Tensor, Tensor], Any]
    ) -> _Late:
        result, copy = torch.empty_like(output), sent.clone()
        call(result, copy.clone()).wait()
        output.fill_(torch.nan)
        late = self._added(name, output, result)
        if _shares(output, sent):
            sent.fill_(torch.nan)  # what is scattered in place is worth nothing from here on
        else:
            late.sent, late.copy = lambda: sent, copy
        return late

    def _added(self, name: str, output: Tensor, result: Tensor) -> _Late:
        link = self._link
        link.busy = max(link.now, link.busy) + link.latency
        late = _Late(link, name, link.begun, output, result, link.busy)
        link.begun += 1
        link.events.append(("begin", name, late.number))
        link.under_way.append(late)
        return late


def _shares(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage()._cdata == y.untyped_storage()._cdata
