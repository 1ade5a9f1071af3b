"""When each action happens if ranks do their rows in order, each as soon as it can.

Purpose: the time of a schedule.  Non-goals: whether it is right (`check`), what ranks hold meanwhile (`holding`), a
better one (`listing`).
"""

from collections.abc import Iterator

from .actions import Schedule
from .dependencies import Step, Value, in_order
from .timeline import Slot, Timeline, Times


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
