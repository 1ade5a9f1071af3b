"""When each action happens if ranks do their rows in order, each as soon as it can, and what they hold meanwhile.

Purpose: the time and the high-water mark of a schedule.  Non-goals: whether it is right (`check`), a better one
(`listing`).
"""

from collections.abc import Iterator

from attrs import frozen

from .actions import Row, Schedule, Work
from .timeline import Slot, Timeline, Times
from .waits import Step, Value, in_order


def simulate(schedule: Schedule, times: Times) -> Timeline:
    """Each action begins when its rank is free and what it needs is there; messages do not hold ranks up.

    Raises Stuck where rows wait for each other in a circle.
    """
    slots: list[list[Slot]] = [[] for _ in schedule.rows]
    for step, slot in timed(schedule, times):
        slots[step.cell.rank].append(slot)
    return Timeline(tuple(map(tuple, slots)))


def timed(schedule: Schedule, times: Times) -> Iterator[tuple[Step, Slot]]:
    """What computes and when, each behind what it waits for; raises Stuck."""
    homes = schedule.homes
    free = [0.0] * schedule.ranks
    done: dict[Value, float] = {}
    for step in in_order(schedule):
        rank = step.cell.rank
        start = free[rank]
        for value in step.needs:
            start = max(start, done[value] if homes[value.stage] == rank else done[value] + times.send)
        free[rank] = end = start + times.of(step.action)
        if step.makes:
            done[step.makes] = end
        yield step, Slot(step.action, start, end)


@frozen
class Keeps:
    """How much a rank holds for one microbatch of each stage; one unit for all."""

    input: tuple[float, ...]
    """From its forward to the input part of its backward."""
    weight: tuple[float, ...]
    """From the input part to the weight part."""

    @classmethod
    def uniform(cls, stages: int, input: float = 1, weight: float = 1) -> "Keeps":
        """The same for all stages; as it stands it counts microbatches."""
        return cls((input,) * stages, (weight,) * stages)


def high_water(schedule: Schedule, keeps: Keeps | None = None) -> tuple[float, ...]:
    """The most that each rank holds at once; without `keeps`, of how many forwards backward is not done."""
    keeps = keeps or Keeps.uniform(schedule.stages)
    return tuple(_most(row, keeps) for row in schedule.rows)


def _most(row: Row, keeps: Keeps) -> float:
    held = most = 0
    for action in row:
        match action.work:
            case Work.FORWARD:
                held += keeps.input[action.stage]
            case Work.BACKWARD:
                held -= keeps.input[action.stage]
            case Work.INPUT:
                held += keeps.weight[action.stage] - keeps.input[action.stage]
            case Work.WEIGHT:
                held -= keeps.weight[action.stage]
            case _:
                pass
        most = max(most, held)
    return most
