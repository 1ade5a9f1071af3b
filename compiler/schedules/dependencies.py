"""Dependencies of actions: the one place that knows what F, B, I and W need of each other."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .actions import Action, Work


class Value(NamedTuple):
    """A value that one action makes and others wait for; messages carry them."""

    gradient: bool
    """The gradient of what the stage received; else what the stage makes of it."""
    stage: int
    microbatch: int


PARTS = {Work.FORWARD: "F", Work.INPUT: "I", Work.WEIGHT: "W", Work.BACKWARD: "IW"}
"""Which parts of a stage's work an action does."""


class Cell(NamedTuple):
    """A place in the rows."""

    rank: int
    at: int


class Stuck(Exception):
    """Rows that cannot go on: the cell at which each rank waits, and for what."""

    def __init__(self, waits: Mapping[Cell, Value]) -> None:
        super().__init__(
            ", ".join(f"rank {rank} waits in cell {at} for {value}" for (rank, at), value in waits.items())
        )
        self.waits = waits


def made_by(action: Action) -> Value | None:
    """The value that a computing action makes; none for the weight part, for which nothing waits."""
    if action.work is Work.WEIGHT:
        return None
    return Value(action.work is not Work.FORWARD, action.stage, action.microbatch)


def carried(message: Action) -> Value:
    """The value that a send or receive moves."""
    if not message.work.is_message:
        raise ValueError(f"{message} moves nothing")
    gradient = message.work in (Work.SEND_BACKWARD, Work.RECEIVE_BACKWARD)
    return Value(gradient, message.stage if message.work.sends else message.peer, message.microbatch)


def needs(action: Action, stages: int) -> tuple[Value, ...]:
    """The values that a computing action needs, those of its own rank first."""
    stage, microbatch = action.stage, action.microbatch
    if action.work is Work.FORWARD:
        return (Value(False, stage - 1, microbatch),) if stage else ()
    if action.work is Work.WEIGHT:
        return (Value(True, stage, microbatch),)
    own = Value(False, stage, microbatch)
    return (own, Value(True, stage + 1, microbatch)) if stage + 1 < stages else (own,)


def circles(waits: Mapping[int, int]) -> list[tuple[int, ...]]:
    """The ranks that wait for each other in a circle, where each waits for one at most; the lowest rank first."""
    from networkx import DiGraph, simple_cycles  # needed only where rows are wrong, and slow to import

    found: Iterator[list[int]] = simple_cycles(DiGraph([*waits.items()]))
    lowest = ((ranks, ranks.index(min(ranks))) for ranks in found)
    return sorted((*ranks[at:], *ranks[:at]) for ranks, at in lowest)
