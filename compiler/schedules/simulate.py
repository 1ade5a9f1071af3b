"""When each action happens if ranks do their rows in order, each as soon as it can, and what they hold meanwhile.

Purpose: the time and the high-water mark of a schedule.  Non-goals: whether it is right (`check`), a better one
(`listing`).
"""

from attrs import frozen

from .actions import Row, Schedule, Work
from .timeline import Slot, Timeline, Times
from .waits import Value, in_order, made_by, needs


def simulate(schedule: Schedule, times: Times) -> Timeline:
    """Each action begins when its rank is free and what it needs is there; messages do not hold ranks up.

    Raises Stuck where rows wait for each other in a circle.
    """
    homes, stages = schedule.homes, schedule.stages
    slots: list[list[Slot]] = [[] for _ in schedule.rows]
    free = [0.0] * schedule.ranks
    done: dict[Value, float] = {}
    for (rank, _), action in in_order(schedule):
        start = free[rank]
        for value in needs(action, stages):
            start = max(start, done[value] + (0 if homes[value.stage] == rank else times.send))
        free[rank] = start + times.of(action)
        slots[rank].append(Slot(action, start, free[rank]))
        if value := made_by(action):
            done[value] = free[rank]
    return Timeline(tuple(map(tuple, slots)))


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
