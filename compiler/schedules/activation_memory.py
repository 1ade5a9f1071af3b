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
    """The actions of a rank that compute, and what it holds during each beside its own microbatch
    in its stage.

    kept    of other microbatches, and of this one in other stages
    handed  of what stages hand to each other, but for that which the action takes
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
        return self.cuts[min(stage, other)] if self.cuts else self.handed

    def entering(self, stage: int) -> float:
        """Bytes that a stage gets from the one before it; nothing enters the first."""
        return self.between(stage - 1, stage) if stage else 0

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
        """Its memory then."""
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
    def counted(cls, ranks: int, stages: int, most: float) -> "MemoryBudget":
        """The same number of microbatches on each rank, each in one of its stages."""
        return cls((most,) * ranks, Keeps.uniform(stages))

    def holds(self, schedule: Schedule) -> bool:
        """Whether all ranks keep to it."""
        return all(
            held <= most
            for held, most in zip(high_water(schedule, self.keeps), self.most, strict=True)
        )


def beside(schedule: Schedule, keeps: Keeps) -> Iterator[Beside]:
    """The row of each rank; `handed` needs messages."""
    import numpy as np

    from .cell_table import cell_table

    cells, last = cell_table(schedule), schedule.stages - 1
    more = cells.each(lambda action: _more(action, last, keeps))
    takes = cells.each(lambda action: passes(action, last, keeps)[0])
    before, after = cells.each(keeps.before), cells.each(keeps.after)
    first = np.zeros(len(cells.kinds), dtype=np.int64)  # of each kind
    first[cells.like[::-1]] = np.arange(len(cells.like))[::-1]
    more[first[cells.are_sends[first]]] = 0  # none before it is gone
    for rank in range(schedule.ranks):
        row = cells.row(rank)
        computes = ~cells.are_messages[row]
        own = row[computes]
        handed = np.concatenate(([0], more[row])).cumsum()[:-1][computes]
        kept = np.concatenate(([0], after[own] - before[own])).cumsum()[:-1]
        yield Beside(cells.where(own), kept - before[own], handed - takes[own])


def _more(action: Action, last: int, keeps: Keeps) -> float:
    """Memory that an action adds between stages; when a send begins, the one before of its kind
    is gone.
    """
    if action.work.is_message:
        size = keeps.between(action.stage, action.peer)
        return -size if action.work.sends else size
    takes, makes = passes(action, last, keeps)
    return makes - takes


def passes(action: Action, last: int, keeps: Keeps) -> tuple[float, float]:
    """The values that an action takes from another stage, and makes for another."""
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
    """The most that each rank holds at once; without `keeps`, of how many forwards backward is not
    done.

    Rows have messages, unless what stages hand to each other counts nothing.
    """
    of = keeps or Keeps.uniform(schedule.stages)
    each = (
        (it, it.cells.each(lambda action: max(of.before(action), of.after(action))))
        for it in beside(schedule, of)
    )
    return tuple((it.kept + it.handed + own).max(initial=0).item() for it, own in each)


def always_handed(stage_to_rank: tuple[int, ...], rank: int, keeps: Keeps) -> float:
    """How much of what stages hand to each other a rank always needs memory for.

    One gradient for each stage that others give one: whatever else it holds, what frees memory can
    then go on.  And those of which one is under way.
    """
    last = len(stage_to_rank) - 1
    stages = stages_of_rank(stage_to_rank, rank)
    gradients = sum(keeps.between(stage, stage + 1) for stage in stages if stage < last)
    near = (
        (stage, other) for stage in stages for other in (stage - 1, stage + 1) if 0 <= other <= last
    )
    return gradients + sum(keeps.between(*pair) for pair in near if stage_to_rank[pair[1]] != rank)


def least(stage_to_rank: tuple[int, ...], rank: int, keeps: Keeps) -> float:
    """The memory of a single microbatch on a rank before any backward, the least that it needs."""
    own = sum(keeps.input[stage] for stage in stages_of_rank(stage_to_rank, rank))
    return own + always_handed(stage_to_rank, rank, keeps)
