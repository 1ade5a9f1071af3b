"""A schedule made for given times and memory: `schedule = auto(memory = …)`.

Purpose: the best of all that is known: the schedules with names, rows made by rules, and a search.  Non-goals: where
stages lie and what they cost (`passes.cut_stages`).
"""

from collections.abc import Iterator
from itertools import islice

from .actions import Action, Row, Schedule, Work
from .beam import searched
from .generate import SCHEDULES
from .impossible import Impossible
from .priorities import followed, rules
from .progress import Task
from .simulate import Keeps, high_water, simulate
from .timeline import Times

EFFORT = 6_000  # cells that rules may write, and orders that the search may go on from: a few seconds


def listed(
    homes: tuple[int, ...], microbatches: int, times: Times, memory: tuple[float, ...], keeps: Keeps
) -> Schedule:
    """The fastest schedule found in which no rank holds more than its `memory`; the best there is in small cases.

    No slower than any schedule with a name that has these homes and keeps the bound.  `Impossible` if one microbatch
    alone is too much for a rank.
    """
    task = Task(homes, microbatches, times, memory, keeps)
    _demand_room(task)
    tries = EFFORT // (3 * len(homes) * microbatches)
    named = (schedule for schedule in _named(task) if _keeps_bound(schedule, task))
    ruled = (followed(rule, task).schedule() for rule in islice(rules(task), max(1, tries)))
    timed = ((simulate(schedule, times).total, schedule.splits, schedule) for schedule in (*named, *ruled))
    total, _, best = min(timed, key=lambda each: each[:2])
    better = searched(task, total, tries) if tries else None
    return _joined(better.schedule() if better else best, times)


def _demand_room(task: Task) -> None:
    for rank, stages in enumerate(task.stages_of):
        least, most = sum(task.keeps.input[stage] for stage in stages), task.memory[rank]
        if least > most:
            raise Impossible(
                f"rank {rank} holds {least:g} for one microbatch before any backward, and may hold {most:g}",
                "give it more memory, or fewer layers to its stages",
            )


def _named(task: Task) -> Iterator[Schedule]:
    ranks = len(task.memory)
    for maker in SCHEDULES.values():
        try:
            schedule = maker(ranks, task.microbatches, len(task.homes) // ranks)
        except Impossible:
            continue
        if schedule.homes == task.homes:
            yield schedule


def _keeps_bound(schedule: Schedule, task: Task) -> bool:
    return all(most <= bound for most, bound in zip(high_water(schedule, task.keeps), task.memory, strict=True))


def _joined(schedule: Schedule, times: Times) -> Schedule:
    """The same with backward in one on the ranks where nobody waits for its first part alone."""
    total = simulate(schedule, times).total
    for rank, row in enumerate(schedule.rows):
        rows = (*schedule.rows[:rank], _whole(row), *schedule.rows[rank + 1 :])
        joined = Schedule(schedule.homes, schedule.microbatches, rows)
        if simulate(joined, times).total <= total:
            schedule = joined
    return schedule


def _whole(row: Row) -> Row:
    """The row with one B for each I that its W follows."""
    cells: list[Action] = []
    for action in row:
        before = Action(action.stage, Work.INPUT, action.microbatch)
        if action.work is Work.WEIGHT and cells[-1:] == [before]:
            cells[-1] = Action(action.stage, Work.BACKWARD, action.microbatch)
        else:
            cells.append(action)
    return tuple(cells)
