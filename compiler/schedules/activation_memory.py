"""Activation memory of ranks over their rows: microbatches between forward and backward, and
values between stages.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from attrs import frozen

from .actions import Action, Schedule, Work, stages_of_rank

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .cell_table import CellTable


@frozen(eq=False)
class Beside:
    """The actions of a rank that compute, and the memory that it holds during each beside the
    action's own microbatch in its stage.

    kept    for other microbatches, and for this one in other stages
    handed  for values between stages, except the value that the action takes
    """

    cells: "CellTable"
    kept: "NDArray[Any]"
    handed: "NDArray[Any]"


@frozen
class Keeps:
    """How much a rank holds for one microbatch of each stage; one unit for all."""

    input: tuple[float, ...]
    """From its forward to the input part of its backward."""
    weight: tuple[float, ...]
    """From the input part to the weight part."""
    handed: float = 0
    """Peak memory of values between stages: each from where its message begins, or from the action
    that makes it for a stage of the same rank, to the action that takes it.  One value of each kind
    that a stage sends is under way until the next."""
    cuts: tuple[float, ...] = ()
    """Bytes that each stage hands to the next, and gets back, where stages differ."""

    @classmethod
    def uniform(cls, stages: int, input: float = 1, weight: float = 1) -> "Keeps":
        """The same for all stages; the defaults count microbatches."""
        return cls((input,) * stages, (weight,) * stages)

    def between(self, stage: int, other: int) -> float:
        """Bytes that two neighbours hand to each other."""
        if self.cuts:
            return self.cuts[min(stage, other)]
        return self.handed

    def entering(self, stage: int) -> float:
        """Bytes that a stage gets from the one before it; nothing enters the first."""
        if not stage:
            return 0
        return self.between(stage - 1, stage)

    def before(self, action: Action) -> float:
        """The memory of a microbatch in a stage before an action that computes."""
        match action.work:
            case Work.FORWARD:
                return 0
            case Work.WEIGHT:
                return self.weight[action.stage]
            case _:
                return self.input[action.stage]

    def after(self, action: Action) -> float:
        """The memory of a microbatch in a stage after an action that computes."""
        match action.work:
            case Work.FORWARD:
                return self.input[action.stage]
            case Work.INPUT:
                return self.weight[action.stage]
            case _:
                return 0


@frozen
class MemoryBudget:
    """The most that each rank may hold."""

    most: tuple[float, ...]
    keeps: Keeps

    @classmethod
    def of_microbatches(cls, ranks: int, stages: int, most: float) -> "MemoryBudget":
        """The same number of microbatches on each rank, each in one of its stages."""
        return cls((most,) * ranks, Keeps.uniform(stages))

    def holds(self, schedule: Schedule) -> bool:
        """Whether no rank holds more than it may."""
        highest = high_water(schedule, self.keeps)
        return all(memory <= most for memory, most in zip(highest, self.most, strict=True))


def memory_beside(schedule: Schedule, keeps: Keeps) -> Iterator[Beside]:
    """The row of each rank; `handed` needs messages."""
    import numpy as np

    from .cell_table import cell_table

    cells, last = cell_table(schedule), schedule.stages - 1
    more = cells.map_kinds(lambda action: _more(action, last, keeps))
    takes = cells.map_kinds(lambda action: get_traffic(action, last, keeps)[0])
    before, after = cells.map_kinds(keeps.before), cells.map_kinds(keeps.after)
    first = np.zeros(len(cells.kinds), dtype=np.int64)  # the first cell of each kind
    first[cells.kind[::-1]] = np.arange(len(cells.kind))[::-1]
    more[first[cells.are_sends[first]]] = 0  # before the first send of a kind no value is freed
    for rank in range(schedule.ranks):
        row = cells.row(rank)
        computes = ~cells.are_messages[row]
        computing = row[computes]
        handed = np.concatenate(([0], more[row])).cumsum()[:-1][computes]
        kept = np.concatenate(([0], after[computing] - before[computing])).cumsum()[:-1]
        yield Beside(cells.select(computing), kept - before[computing], handed - takes[computing])


def _more(action: Action, last: int, keeps: Keeps) -> float:
    """Memory for values between stages that an action adds; when a send begins, the value of the
    send before it of the same kind is gone.
    """
    if action.work.is_message:
        size = keeps.between(action.stage, action.peer)
        return -size if action.work.sends else size
    takes, makes = get_traffic(action, last, keeps)
    return makes - takes


def get_traffic(action: Action, last: int, keeps: Keeps) -> tuple[float, float]:
    """Bytes of the value that an action takes from another stage, and of the value that it makes
    for another.
    """
    stage = action.stage
    follows = keeps.entering(stage)
    precedes = keeps.between(stage, stage + 1) if stage < last else 0
    match action.work:
        case Work.FORWARD:
            return follows, precedes
        case Work.WEIGHT:
            return 0, 0
        case _:
            return precedes, follows


def high_water(schedule: Schedule, keeps: Keeps | None = None) -> tuple[float, ...]:
    """The most that each rank holds at once; without `keeps`, the most microbatches whose backward
    is not done.

    Rows have messages, unless `keeps` counts nothing for values between stages.
    """
    sizes = keeps or Keeps.uniform(schedule.stages)

    def memory_of(action: Action) -> float:
        """The most memory of the action's own microbatch in its stage."""
        return max(sizes.before(action), sizes.after(action))

    highest: list[float] = []
    for others in memory_beside(schedule, sizes):
        memory = others.kept + others.handed + others.cells.map_kinds(memory_of)
        highest.append(memory.max(initial=0).item())
    return tuple(highest)


def always_handed(stage_to_rank: tuple[int, ...], rank: int, keeps: Keeps) -> float:
    """The memory for values between stages that a rank always needs.

    It needs memory for one gradient for each stage that gets one from another stage: whatever else
    the rank holds, actions that free memory can then go on.  And it needs memory for the values
    that are on their way to other ranks, one of each kind.
    """
    last = len(stage_to_rank) - 1
    stages = stages_of_rank(stage_to_rank, rank)
    gradients = sum(keeps.between(stage, stage + 1) for stage in stages if stage < last)
    under_way: list[float] = []
    for stage in stages:
        for other in (stage - 1, stage + 1):
            if 0 <= other <= last and stage_to_rank[other] != rank:
                under_way.append(keeps.between(stage, other))
    return gradients + sum(under_way)


def least(stage_to_rank: tuple[int, ...], rank: int, keeps: Keeps) -> float:
    """The memory of a single microbatch on a rank before any backward, the least that it needs."""
    inputs = sum(keeps.input[stage] for stage in stages_of_rank(stage_to_rank, rank))
    return inputs + always_handed(stage_to_rank, rank, keeps)
