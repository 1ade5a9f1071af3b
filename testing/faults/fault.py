"""Faults: a point of a run, and an action that happens there."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from torch import Tensor

Event = Literal[
    "start", "data", "step", "collective", "prepare", "write", "sync", "publish", "remove"
]
EVENTS: tuple[Event, ...] = get_args(Event)
"""Points of a run: the program begins; a batch is read; a step; a collective is begun; a save
begins, writes bytes, has a file or folder on the disk, gives the checkpoint its name, takes an
older one's away and removes its files."""

Memory = Literal["weights", "state"]


@dataclass(frozen=True)
class Point:
    """The `nth` time, from 0, that a rank is about to come to an event, of a step if one is named.

    Steps count from 1, as in logs; a save's is the last step that it holds.
    """

    event: Event
    step: int | None = None
    rank: int = 0
    nth: int = 0

    def fits(self, event: Event, step: int, rank: int) -> bool:
        """Whether it is such a point; how often it has been reached is not looked at."""
        return (event, rank) == (self.event, self.rank) and self.step in (None, step)


@dataclass(frozen=True)
class Scene:
    """A rank at the point where a fault strikes: its number, and the processes by rank, `-1` the
    launcher.

    `memory`, where the event is a step, is an element, [1], of the weights that the model computes
    with, and one of the state that optimizers update and saves write.
    """

    rank: int
    processes: Mapping[int, int]
    memory: Mapping[Memory, Tensor]


class Action(Protocol):
    """Something that goes wrong."""

    def strike(self, scene: Scene) -> None:
        """Does it, within the rank that is at the point; an exception that it raises is the
        rank's own.
        """
        ...


@dataclass(frozen=True)
class Fault:
    """An action at a point; it happens at the first `times` such points of the job, restarts
    included.
    """

    at: Point
    do: Action
    times: int = 1
