"""How much of a number of bytes is left for a pipeline's microbatches on each rank: `schedule = auto(memory = 40GiB)`.

Purpose: what the account says of ranks before there are rows, so that rows can be made which keep to it.
Non-goals: the rows (`schedules.list_scheduling`), and what they hold in the end (`pipeline_peak`).
"""

from ...config.units import amount
from ...ir import Program
from ...schedules.actions import ScheduleError, Work
from ...schedules.activation_memory import MemoryBudget, least
from ..expert_loads import with_room
from .account import Account, idle
from .pipeline_peak import Chunks, Stage, keeps, stages_of


def memory_budget(program: Program, most: int) -> MemoryBudget:
    """Memory that microbatches may take where a rank holds no more than `most` bytes in all.

    An action may take as much besides as that of its rank which takes most: which runs when is not known.
    Raises ScheduleError where a single microbatch is too much.
    """
    program = with_room(program)
    assert program.pipeline, "memory: no pipeline"
    of = stages_of(program)
    sizes = keeps(program, of)
    left: list[float] = []
    for rank, it in enumerate(idle(program, of)):
        own = program.pipeline.stages_of(rank)
        passing = max(_passing(of[stage]) for stage in own) + Chunks(program, program.pipeline, rank).most
        _demand(it, passing, int(least(program.pipeline.stage_to_rank, rank, sizes)), most)
        left.append(most - it.always - passing)
    return MemoryBudget(tuple(left), sizes)


def _passing(stage: Stage) -> int:
    """Memory that actions of a stage take for themselves, beyond what is held before or after them."""
    held = {
        Work.FORWARD: stage.held,
        Work.BACKWARD: stage.held,
        Work.INPUT: max(stage.held, stage.later),
        Work.WEIGHT: stage.later,
    }
    return max(0, *(stage.during(work).bytes - size for work, size in held.items()))


def _demand(it: Account, passing: int, least: int, most: int) -> None:
    """State and a microbatch, or the update, must fit."""
    update = it.always + it.peak.bytes
    if (needs := max(it.always + passing + least, update)) <= most:
        return
    sizes = {"of state and inputs": it.always}
    if needs > update:
        sizes |= {"of one microbatch": least, "while it is done": passing}
    else:
        sizes |= {"of the update": it.peak.bytes}
    said = " + ".join(f"{amount(size)} {what}" for what, size in sizes.items() if size)
    raise ScheduleError(
        f"rank {it.rank} needs {said} = {amount(needs)}, but its memory budget is {amount(most)}",
        "raise the memory budget, use smaller microbatches, or shard its state",
    )
