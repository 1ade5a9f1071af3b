"""Messages of a sanitized run: each carries the hashes of its values, which the receiver compares.

Non-goals: what is said of a difference (`sanitize`), messages as such (`messages`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from .mesh import Crossing, Watch
from .p2p import Message, Slot, Values


def watched_send(message: Message, watch: Watch) -> Message:
    """Sends the hashes of what is sent, too."""

    def ready() -> Values:
        values = message.ready()
        return (*values, watch.hashes(values))

    return _Watched(ready, message.call, message.peer, message.under_way)


def watched_receive(message: Message, watch: Watch, of: Crossing, device: torch.device) -> Message:
    """Receives the hashes too; who takes the values finds out whether they are those that were sent."""

    def ready() -> Values:
        return (*message.ready(), torch.empty(len(of.names), 3, dtype=torch.int64, device=device))

    return _Watched(ready, message.call, message.peer, _Arriving(message.under_way, partial(watch.arrived, message=of)))


class _Watched(Message):
    """What is last in its memory are hashes."""

    def begin(self, memory: Values) -> tuple[Any, ...]:
        works = super().begin(memory[:-1])
        with _disable_current_modes():  # a recorder's: this message is none of the plan's
            return (*works, self.call([memory[-1]], self.peer, 0))


class _Arriving(Slot):
    """Passes values on to a slot, to be compared when they are taken."""

    __slots__ = ("_compare", "_slot")

    def __init__(self, slot: Slot, compare: Callable[[Sequence[Tensor], Tensor], None]) -> None:
        super().__init__()
        self._slot, self._compare = slot, compare

    def put(self, values: Values, works: tuple[Any, ...] = ()) -> None:
        own, hashes = values[:-1], values[-1]
        self._slot.put(own, (*works, _Awaited(partial(self._compare, own, hashes))))


@dataclass(frozen=True, slots=True)
class _Awaited:
    """Behind what is waited for."""

    wait: Callable[[], None]
