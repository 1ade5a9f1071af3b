"""Point-to-point messages between stages: started without waiting, awaited where they are used.

A received value is waited for by the action that takes it; a sent one before the next of its kind
is sent, and all at the end: so of each kind one is in memory at most.  On CUDA the current stream
does the waiting, on which values are made and used, and their memory is released after it:
`record_stream` is not needed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import c10d
from .mesh import Axis, Crossing, Watch

Values = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class StageInput:
    """A value that crosses from stage to stage, as one rank has it.

    gradient  whether its gradient comes back
    cuts      the cuts that it crosses, numbered from 0 after the first stage; by default all
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool = True
    cuts: range | None = None

    def at(self, cut: int) -> bool:
        """Whether it crosses this one."""
        return self.cuts is None or cut in self.cuts


class Slot:
    """A place for values that one action puts and another takes; nothing else holds them
    meanwhile.
    """

    __slots__ = ("_values", "_works")

    def __init__(self) -> None:
        self._values: Values = ()
        self._works: tuple[Any, ...] = ()

    def put(self, values: Values, works: tuple[Any, ...] = ()) -> None:
        """Adds values, and the work to wait for before they are used."""
        self._values += values
        self._works += works

    def take(self) -> Values:
        """All values, after the work that they wait for."""
        for work in self._works:
            work.wait()
        values, self._values, self._works = self._values, (), ()
        return values


@dataclass(frozen=True, eq=False, slots=True)
class Message:
    """A send or a receive."""

    ready: Callable[[], Values]
    """The memory that is sent, or received into."""
    call: Callable[[Tensor, Any, int], Any]
    """`c10d.begin_send` or `c10d.begin_receive`."""
    axis: Axis
    peer: int
    """Its rank along the axis."""
    under_way: Slot
    """Holds the memory while the message is under way."""

    def begin(self, memory: Values) -> tuple[Any, ...]:
        """The work to wait for."""
        return tuple(self.call(value, self.axis.group, self.peer) for value in memory)


def make_send(slot: Slot, axis: Axis, peer: int, under_way: Slot) -> Message:
    """Sends the values in the slot.  All messages of its kind share `under_way`.

    A value that a stage makes as a view that is not contiguous is copied here.  Gradients never
    are: autograd lays out a leaf's gradient as the leaf, which was received.
    """

    def ready() -> Values:
        under_way.take()
        return tuple(value.contiguous() for value in slot.take())

    return Message(ready, c10d.begin_send, axis, peer, under_way)


def make_receive(
    slot: Slot, axis: Axis, peer: int, carried: Sequence[StageInput], device: torch.device
) -> Message:
    """Receives into the slot."""

    def ready() -> Values:
        memory: list[Tensor] = []
        for value in carried:
            memory.append(torch.empty(value.shape, dtype=value.dtype, device=device))
        return tuple(memory)

    return Message(ready, c10d.begin_receive, axis, peer, slot)


class Exchange:
    """Messages that begin as one, on both their ranks, so that messages of the two directions do
    not wait for each other.

    Where the backend can begin messages as one, a single message also begins this way.  NCCL uses
    another communicator for other messages, where the other end would wait in vain.
    """

    def __init__(self, axis: Axis, messages: Sequence[Message], device: torch.device) -> None:
        self._group, self._messages, self._device = axis.group, messages, device
        self._as_one = c10d.takes_groups(axis.group, device)

    def begin(self, _: object) -> None:
        """Begins all messages.  It waits only for earlier sends of the kinds that it sends."""
        values = [message.ready() for message in self._messages]

        def begin() -> list[tuple[Any, ...]]:
            """Begins each message; the work to wait for, by message."""
            works: list[tuple[Any, ...]] = []
            for message, memory in zip(self._messages, values, strict=True):
                works.append(message.begin(memory))
            return works

        if self._as_one:
            work = c10d.as_one(begin, self._group, self._device)
            works: list[tuple[Any, ...]] = [(work,)] * len(values)
        else:
            works = begin()
        for message, memory, message_works in zip(self._messages, values, works, strict=True):
            message.under_way.put(memory, message_works)


def make_checked_send(message: Message, watch: Watch) -> Message:
    """Sends the hashes of the values, too."""

    def ready() -> Values:
        values = message.ready()
        return (*values, watch.hashes(values))

    return _Watched(ready, message.call, message.axis, message.peer, message.under_way)


def make_checked_receive(
    message: Message, watch: Watch, crossing: Crossing, device: torch.device
) -> Message:
    """Receives the hashes too; when the values are taken, they are compared with the values that
    were sent.
    """

    def ready() -> Values:
        return (
            *message.ready(),
            torch.empty(len(crossing.names), 3, dtype=torch.int64, device=device),
        )

    arriving = _Arriving(message.under_way, partial(watch.check_message, message=crossing))
    return _Watched(ready, message.call, message.axis, message.peer, arriving)


class _Watched(Message):
    """A message whose memory ends with hashes."""

    def begin(self, memory: Values) -> tuple[Any, ...]:
        works = super().begin(memory[:-1])
        self.axis.asides += 1
        with c10d.hide_from_recorders():
            return (*works, self.call(memory[-1], self.axis.group, self.peer))


class _Arriving(Slot):
    """Passes values on to a slot, to be compared when they are taken."""

    __slots__ = ("_compare", "_slot")

    def __init__(self, slot: Slot, compare: Callable[[Sequence[Tensor], Tensor], None]) -> None:
        super().__init__()
        self._slot, self._compare = slot, compare

    def put(self, values: Values, works: tuple[Any, ...] = ()) -> None:
        payload, hashes = values[:-1], values[-1]
        self._slot.put(payload, (*works, _Awaited(partial(self._compare, payload, hashes))))


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A last wait, after the values' own."""

    wait: Callable[[], None]
