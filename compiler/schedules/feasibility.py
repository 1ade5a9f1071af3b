"""The requirements of a schedule in the making, how far its stages are, and the memory that this
takes on ranks.
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
        """The number of cells of all rows if each backward is in two parts."""
        return 3 * self.stages * self.microbatches

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank."""
        return tuple(stages_of_rank(self.stage_to_rank, rank) for rank in range(self.ranks))

    @cached_property
    def always(self) -> tuple[float, ...]:
        """Memory that each rank always needs for values that stages hand to each other."""
        keeps = self.budget.keeps
        return tuple(always_handed(self.stage_to_rank, rank, keeps) for rank in range(self.ranks))

    @cached_property
    def is_bound(self) -> tuple[bool, ...]:
        """For each stage, whether its work takes memory of a rank that has a budget."""
        most = self.budget.most
        # where budgets count values between stages, work takes memory of neighbours too
        near = int(bool(self.budget.keeps.handed))
        is_bound: list[bool] = []
        for stage in range(self.stages):
            ranks = self.stage_to_rank[max(stage - near, 0) : stage + near + 1]
            is_bound.append(any(not isinf(most[rank]) for rank in ranks))
        return tuple(is_bound)

    def ranks_affected_by(self, stage: int, work: Work) -> set[int]:
        """The ranks that have other moves after this one: the work's own rank, and the rank that
        gets its result.

        Where a rank's budget counts values from other ranks too, the ranks that give this rank
        something are among them.
        """
        stage_to_rank = self.stage_to_rank
        if self.budget.keeps.handed:
            return self._near[stage_to_rank[stage]]
        to = stage + (work is Work.FORWARD) - (work in (Work.INPUT, Work.BACKWARD))
        return {stage_to_rank[stage], stage_to_rank[min(max(to, 0), self.stages - 1)]}

    @cached_property
    def _near(self) -> tuple[set[int], ...]:
        """For each rank the ranks that its stages give something to or get something from, and
        the rank itself.
        """
        near = tuple({rank} for rank in range(self.ranks))
        for one, other in pairwise(self.stage_to_rank):
            near[one].add(other)
            near[other].add(one)
        return near

    def delay(self, stage: int, other: int) -> float:
        """The time of a message from one stage to another."""
        if self.stage_to_rank[stage] == self.stage_to_rank[other]:
            return 0
        return self.times.send


@define
class Filling:
    """How many microbatches have been through each stage, forward and backward, and the memory
    that ranks hold.
    """

    task: Task
    forwards: list[int]
    backwards: list[int]
    memory_of_rank: list[float]
    """The memory of each rank, with the memory that it always needs; the first gradient that a
    stage gets is part of this.
    """

    @classmethod
    def begin(cls, task: Task) -> "Filling":
        """The state where nothing is done."""
        return cls(task, [0] * task.stages, [0] * task.stages, [*task.always])

    def copy(self) -> "Filling":
        """A copy that goes on by itself."""
        return Filling(
            self.task, self.forwards.copy(), self.backwards.copy(), self.memory_of_rank.copy()
        )

    def do(self, stage: int, work: Work) -> None:
        """Takes note of work of a stage."""
        stage_to_rank, keeps = self.task.stage_to_rank, self.task.budget.keeps
        rank = stage_to_rank[stage]
        match work:
            case Work.FORWARD:
                self.forwards[stage] += 1
                self.memory_of_rank[rank] += keeps.input[stage] - keeps.entering(stage)
                if stage + 1 < len(stage_to_rank):
                    self.memory_of_rank[stage_to_rank[stage + 1]] += keeps.entering(stage + 1)
            case Work.WEIGHT:
                self.memory_of_rank[rank] -= keeps.weight[stage]
            case _:
                self.memory_of_rank[rank] -= keeps.input[stage]
                if work is Work.INPUT:
                    self.memory_of_rank[rank] += keeps.weight[stage]
                if self._pending_gradients(stage) > 1:
                    self.memory_of_rank[rank] -= keeps.entering(stage + 1)
                self.backwards[stage] += 1
                if stage and self._pending_gradients(stage - 1) > 1:
                    self.memory_of_rank[stage_to_rank[stage - 1]] += keeps.entering(stage)

    def takes(self, stage: int, work: Work) -> bool:
        """Whether work takes memory that has a budget: then the memory that it leaves to others may
        matter.

        A gradient that a stage hands on does not count: the action that makes it frees more.
        """
        keeps = self.task.budget.keeps
        raises = work is Work.INPUT and keeps.weight[stage] > keeps.input[stage]
        return self.task.is_bound[stage] and (raises or work is Work.FORWARD)

    def allows(self, stage: int, work: Work) -> bool:
        """Whether work fits in memory, and the work that must follow it still fits."""
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
        """Whether a forward may go: its own rank holds more, and the next stage's rank holds the
        result.
        """
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
        """Whether a rank can hold `more` bytes when a stage has done one more forward, and then
        still everything that comes before any backward frees memory.

        A microbatch's backward comes after its forwards on all stages, and microbatches keep their
        order; so the rank holds the memory of a microbatch, and of the microbatches after it, until
        the microbatch has been through the rank's other stages.
        """
        task, most = self.task, self.task.budget.most[rank]
        if self.memory_of_rank[rank] + more > most:
            return False
        keeps, stages = task.budget.keeps, task.stages_of[rank]
        forwards = self.forwards
        firsts = {forwards[s] + (s == stage) for s in stages}
        for first in firsts:
            if first > forwards[stage]:
                continue
            needs = task.always[rank]
            for s in stages:
                f = forwards[s] + (s == stage)
                count = 1
                if f > first:
                    count = f - max(first, self.backwards[s])
                needs += keeps.input[s] * count
                if keeps.handed and s:
                    arrived = forwards[s - 1] + (s - 1 == stage)
                    needs += keeps.entering(s) * max(arrived - max(f, first + 1), 0)
            if needs > most:
                return False
        return True

    def _allows_backward(self, stage: int, work: Work) -> bool:
        """Whether a backward may go: its weight part, postponed, may take more memory, and the
        stage before gets a gradient.

        The first gradient of a stage always fits: so of all backwards that can be done, the one of
        the first such stage fits.
        """
        task = self.task
        keeps, most = task.budget.keeps, task.budget.most
        rank = task.stage_to_rank[stage]
        if work is Work.INPUT:
            more = keeps.weight[stage] - keeps.input[stage]
            if more > 0 and self.memory_of_rank[rank] + more > most[rank]:
                return False
        if not stage or not keeps.handed or self._pending_gradients(stage - 1) < 1:
            return True
        before = task.stage_to_rank[stage - 1]
        return self.memory_of_rank[before] + keeps.entering(stage) <= most[before]

    def _pending_gradients(self, stage: int) -> int:
        """How many gradients a stage has that it has not taken yet; the last stage gets none."""
        if stage + 1 >= len(self.backwards):
            return 0
        return self.backwards[stage + 1] - self.backwards[stage]
