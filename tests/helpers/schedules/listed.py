"""The fastest schedule of stages whose ranks are given."""

from scalec.compiler.schedules.actions import Schedule
from scalec.compiler.schedules.activation_memory import MemoryBudget
from scalec.compiler.schedules.feasibility import Task
from scalec.compiler.schedules.list_scheduling import fastest
from scalec.compiler.schedules.timeline import Times


def listed(
    stage_to_rank: tuple[int, ...],
    microbatches: int,
    times: Times,
    budget: MemoryBudget,
    splits: bool = True,
) -> Schedule:
    """The schedule that `fastest` finds of this one task."""
    return fastest([Task(stage_to_rank, microbatches, times, budget)], splits)
