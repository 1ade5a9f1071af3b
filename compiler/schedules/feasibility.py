"""The requirements of a schedule in the making, how far its stages are, and how much of ranks'
memory that takes.
"""

from functools import cached_property
from itertools import pairwise
from math import isinf

from attrs import define, frozen

from .actions import Work, stages_of_rank
from .activation_memory import MemoryBudget, always_handed
from .timeline import Times


@frozen(slots=False)
class Task:
    """The requirements of a schedule."""

    stage_to_rank: tuple[int, ...]
    microbatches: int
    times: Times
    budget: MemoryBudget

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.stage_to_rank)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.budget.most)

    @property
    def cells(self) -> int:
        """How many cells rows have in which each backward is in two parts."""
        return 3 * self.stages * self.microbatches

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank."""
        return tuple(stages_of_rank(self.stage_to_rank, rank) for rank in range(self.ranks))

    @cached_property
    def always(self) -> tuple[float, ...]:
        """Memory that each rank needs whatever it does: for values that stages hand to each
        other.
        """
        return tuple(
            always_handed(self.stage_to_rank, rank, self.budget.keeps) for rank in range(self.ranks)
        )

    @cached_property
    def is_bound(self) -> tuple[bool, ...]:
        """For each stage, whether its work takes memory of a rank that has a budget."""
        most, near = self.budget.most, int(bool(self.budget.keeps.handed))
        touched = (self.stage_to_rank[max(s - near, 0) : s + near + 1] for s in range(self.stages))
        return tuple(any(not isinf(most[rank]) for rank in ranks) for ranks in touched)

    def touched(self, stage: int, work: Work) -> set[int]:
        """The ranks that have other moves after this one: its own, that which is given something,
        and, where a rank's budget counts what others give it too, those that give it something."""
        stage_to_rank = self.stage_to_rank
        if self.budget.keeps.handed:
            return self._near[stage_to_rank[stage]]
        to = stage + (work is Work.FORWARD) - (work in (Work.INPUT, Work.BACKWARD))
        return {stage_to_rank[stage], stage_to_rank[min(max(to, 0), self.stages - 1)]}

    @cached_property
    def _near(self) -> tuple[set[int], ...]:
        """For each rank those, it too, to which its stages hand something, and from which they
        are handed it.
        """
        near = tuple({rank} for rank in range(self.ranks))
        for one, other in pairwise(self.stage_to_rank):
            near[one].add(other)
            near[other].add(one)
        return near

    def delay(self, stage: int, other: int) -> float:
        """How long a message takes from one stage to another."""
        return 0 if self.stage_to_rank[stage] == self.stage_to_rank[other] else self.times.send


@define
class Filling:
    """How many microbatches have been through each stage, forward and backward, and what ranks
    hold.
    """

    task: Task
    forwards: list[int]
    backwards: list[int]
    held: list[float]
    """With what ranks always need memory for; it has the first gradient that a stage is given."""

    @classmethod
    def begin(cls, task: Task) -> "Filling":
        """Nothing is done."""
        return cls(task, [0] * task.stages, [0] * task.stages, [*task.always])

    def copy(self) -> "Filling":
        """One that goes on by itself."""
        return Filling(self.task, self.forwards.copy(), self.backwards.copy(), self.held.copy())

    def do(self, stage: int, work: Work) -> None:
        """Takes note of work of a stage."""
        stage_to_rank, keeps = self.task.stage_to_rank, self.task.budget.keeps
        rank = stage_to_rank[stage]
        match work:
            case Work.FORWARD:
                self.forwards[stage] += 1
                self.held[rank] += keeps.input[stage] - keeps.entering(stage)
                if stage + 1 < len(stage_to_rank):
                    self.held[stage_to_rank[stage + 1]] += keeps.entering(stage + 1)
            case Work.WEIGHT:
                self.held[rank] -= keeps.weight[stage]
            case _:
                self.held[rank] -= keeps.input[stage]
                self.held[rank] += keeps.weight[stage] if work is Work.INPUT else 0
                self.held[rank] -= keeps.entering(stage + 1) if self._given(stage) > 1 else 0
                self.backwards[stage] += 1
                if stage and self._given(stage - 1) > 1:
                    self.held[stage_to_rank[stage - 1]] += keeps.entering(stage)

    def takes(self, stage: int, work: Work) -> bool:
        """Whether work takes memory that has a budget: then what it leaves to others may matter.

        A gradient that is handed on is not counted: what it goes with frees more.
        """
        keeps = self.task.budget.keeps
        raises = work is Work.INPUT and keeps.weight[stage] > keeps.input[stage]
        return self.task.is_bound[stage] and (raises or work is Work.FORWARD)

    def allows(self, stage: int, work: Work) -> bool:
        """Whether work fits in memory, and what must follow it still does."""
        if not self.task.is_bound[stage]:
            return True
        match work:
            case Work.FORWARD:
                return self._allows_forward(stage)
            case Work.WEIGHT:
                return True
            case _:
                return self._allows_backward(stage, work)

    def _allows_forward(self, stage: int) -> bool:
        """Its own rank holds more, and that of the next stage what it is given."""
        stage_to_rank, keeps = self.task.stage_to_rank, self.task.budget.keeps
        rank = stage_to_rank[stage]
        if not self._goes_on(rank, stage, keeps.input[stage] - keeps.entering(stage)):
            return False
        target = stage_to_rank[min(stage + 1, len(stage_to_rank) - 1)]
        return (
            target == rank
            or not keeps.handed
            or self._goes_on(target, stage, keeps.entering(stage + 1))
        )

    def _goes_on(self, rank: int, stage: int, more: float) -> bool:
        """Whether a rank can hold so much more when a stage has done one more forward, and then
        still all that comes before any backward frees it.

        A microbatch's backward comes after its forwards on all stages, and microbatches keep their
        order; so what is held of one and of those after it is held until it has been through the
        rank's other stages.
        """
        task, most = self.task, self.task.budget.most[rank]
        if self.held[rank] + more > most:
            return False
        keeps, stages = task.budget.keeps, task.stages_of[rank]
        done = self.forwards
        firsts = {done[s] + (s == stage) for s in stages}
        for first in firsts:
            if first > done[stage]:
                continue
            needs = task.always[rank]
            for s in stages:
                f = done[s] + (s == stage)
                needs += keeps.input[s] * (f - max(first, self.backwards[s]) if f > first else 1)
                if keeps.handed and s:
                    needs += keeps.entering(s) * max(
                        done[s - 1] + (s - 1 == stage) - max(f, first + 1), 0
                    )
            if needs > most:
                return False
        return True

    def _allows_backward(self, stage: int, work: Work) -> bool:
        """Whether a backward may go: postponed, it may take more memory, and the stage before gets
        a gradient.

        Its first one always fits: so of all backwards that can be done that of the first such stage
        fits.
        """
        task = self.task
        keeps, most = task.budget.keeps, task.budget.most
        rank = task.stage_to_rank[stage]
        more = keeps.weight[stage] - keeps.input[stage] if work is Work.INPUT else 0
        if more > 0 and self.held[rank] + more > most[rank]:
            return False
        if not stage or not keeps.handed or self._given(stage - 1) < 1:
            return True
        before = task.stage_to_rank[stage - 1]
        return self.held[before] + keeps.entering(stage) <= most[before]

    def _given(self, stage: int) -> int:
        """How many gradients a stage has that it has not taken yet; the last one is given none."""
        return (
            self.backwards[stage + 1] - self.backwards[stage]
            if stage + 1 < len(self.backwards)
            else 0
        )
