"""Dependencies of actions, and an order in which all can be done.

The one place that knows what F, B, I and W need of each other; everything that walks rows walks them here.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .actions import Action, Schedule, Work


class Value(NamedTuple):
    """A value that one action makes and others wait for; messages carry them."""

    gradient: bool
    """The gradient of what the stage received; else what the stage makes of it."""
    stage: int
    microbatch: int


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


def needs(action: Action, stages: int) -> tuple[Value, ...]:
    """The values that a computing action needs, those of its own rank first."""
    stage, microbatch = action.stage, action.microbatch
    if action.work is Work.FORWARD:
        return (Value(False, stage - 1, microbatch),) if stage else ()
    if action.work is Work.WEIGHT:
        return (Value(True, stage, microbatch),)
    own = Value(False, stage, microbatch)
    return (own, Value(True, stage + 1, microbatch)) if stage + 1 < stages else (own,)


class Step(NamedTuple):
    """A cell that computes, with what it needs and makes."""

    cell: Cell
    action: Action
    needs: tuple[Value, ...]
    makes: Value | None


def in_order(schedule: Schedule) -> Iterator[Step]:
    """All cells that compute, each after those before it in its row and those it waits for; raises Stuck."""
    stages = schedule.stages
    made: set[Value] = set()
    waits: dict[Value, list[Cell]] = {}
    ready = deque(Cell(rank, 0) for rank in range(schedule.ranks))
    while ready:
        rank, start = ready.popleft()
        row = schedule.rows[rank]
        for at in range(start, len(row)):
            action = row[at]
            if action.work.is_message:
                continue
            needed = needs(action, stages)
            if not made.issuperset(needed):
                missing = next(value for value in needed if value not in made)
                waits.setdefault(missing, []).append(Cell(rank, at))
                break
            makes = made_by(action)
            yield Step(Cell(rank, at), action, needed, makes)
            if makes:
                made.add(makes)
                ready.extend(waits.pop(makes, ()))
    if waits:
        raise Stuck({cell: value for value, cells in waits.items() for cell in cells})


def circles(waits: Mapping[int, int]) -> list[tuple[int, ...]]:
    """The ranks that wait for each other in a circle, where each waits for one at most; the lowest rank first."""
    from networkx import DiGraph, simple_cycles  # needed only where rows are wrong, and slow to import

    found: Iterator[list[int]] = simple_cycles(DiGraph([*waits.items()]))
    lowest = ((ranks, ranks.index(min(ranks))) for ranks in found)
    return sorted((*ranks[at:], *ranks[:at]) for ranks, at in lowest)
