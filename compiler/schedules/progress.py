"""A schedule in the making: what each rank has done, what it can do next and when.

Purpose: rows made cell by cell, within the bound on memory and with a way on to the end.  Non-goals: which cell is best
next (`listing`, `beam`).

Microbatches are alike, so each stage takes them in their order, which loses nothing: where two overtake each other they
can be exchanged.
"""

from collections.abc import Iterator
from functools import cached_property
from math import isinf

from attrs import define, frozen

from .actions import Action, Schedule, Work
from .simulate import Keeps
from .timeline import Times


@frozen(slots=False)
class Task:
    """What is asked of a schedule."""

    homes: tuple[int, ...]
    microbatches: int
    times: Times
    memory: tuple[float, ...]
    """The most that each rank may hold."""
    keeps: Keeps

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.homes)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank."""
        ranks = range(len(self.memory))
        return tuple(tuple(stage for stage, home in enumerate(self.homes) if home == rank) for rank in ranks)

    def delay(self, stage: int, other: int) -> float:
        """How long a message takes from one stage to another."""
        return 0 if self.homes[stage] == self.homes[other] else self.times.send


@frozen
class Move:
    """What a rank can do next, and when."""

    stage: int
    work: Work
    start: float
    end: float


@define
class Progress:
    """How far all stages are, and the rows that got them there."""

    task: Task
    rows: list[list[Action]]
    free: list[float]
    """When each rank has done its row."""
    held: list[float]
    """What each rank holds."""
    arrived: list[list[float]]
    """For each stage, when what its forwards take is there, as far as that is known."""
    returned: list[list[float]]
    """For each stage, when what its backwards take is there."""
    forwards: list[int]
    backwards: list[int]
    owed: list[list[int]]
    """The microbatches of each stage of which the weight part is to be done."""

    @classmethod
    def begin(cls, task: Task) -> "Progress":
        """Nothing is done."""
        ranks, stages = len(task.memory), task.stages
        arrived: list[list[float]] = [[0.0] * task.microbatches, *([] for _ in range(stages - 1))]
        rows: list[list[Action]] = [[] for _ in range(ranks)]
        returned: list[list[float]] = [[] for _ in range(stages)]
        owed: list[list[int]] = [[] for _ in range(stages)]
        free, held = [0.0] * ranks, [0.0] * ranks
        return cls(task, rows, free, held, arrived, returned, [0] * stages, [0] * stages, owed)

    def copy(self) -> "Progress":
        """One that goes on by itself."""
        return Progress(
            self.task,
            [row.copy() for row in self.rows],
            self.free.copy(),
            self.held.copy(),
            [times.copy() for times in self.arrived],
            [times.copy() for times in self.returned],
            self.forwards.copy(),
            self.backwards.copy(),
            [owed.copy() for owed in self.owed],
        )

    def schedule(self) -> Schedule:
        """The rows as they are."""
        return Schedule(self.task.homes, self.task.microbatches, tuple(map(tuple, self.rows)))

    @property
    def is_done(self) -> bool:
        """Whether nothing is left."""
        return not any(self.owed) and all(backwards == self.task.microbatches for backwards in self.backwards)

    def done(self) -> tuple[tuple[int, ...], ...]:
        """How far each stage is."""
        return tuple(self.forwards), tuple(self.backwards), tuple(map(len, self.owed))

    def when(self) -> tuple[float, ...]:
        """When each rank can go on, and with what; of two orders that are as far, a better one has all this earlier."""
        when = [*self.free]
        for stage, home in enumerate(self.task.homes):
            free = self.free[home]
            when += (max(free, time) for time in self.arrived[stage][self.forwards[stage] :])
            when += (max(free, time) for time in self.returned[stage][self.backwards[stage] :])
        return tuple(when)

    def takes_memory(self, rank: int, move: Move) -> bool:
        """Whether a move takes something of what is bound on its rank."""
        if isinf(self.task.memory[rank]):
            return False
        keeps = self.task.keeps
        raises = move.work is Work.INPUT and keeps.weight[move.stage] > keeps.input[move.stage]
        return raises or move.work is Work.FORWARD

    def moves(self, rank: int) -> Iterator[Move]:
        """What a rank can do next without breaking its bound, now or later."""
        task, free = self.task, self.free[rank]
        times, keeps = task.times, task.keeps
        for stage in task.stages_of[rank]:
            f, b = self.forwards[stage], self.backwards[stage]
            if f < len(self.arrived[stage]) and self.fits(rank, stage):
                start = max(free, self.arrived[stage][f])
                yield Move(stage, Work.FORWARD, start, start + times.forward[stage])
            if b < len(self.returned[stage]):
                start = max(free, self.returned[stage][b])
                end = start + times.input[stage]
                more = keeps.weight[stage] - keeps.input[stage]
                if more > 0:  # only then backward in one can be better than its parts one after the other
                    yield Move(stage, Work.BACKWARD, start, end + times.weight[stage])
                if more <= 0 or self.held[rank] + more <= task.memory[rank]:
                    yield Move(stage, Work.INPUT, start, end)
            if self.owed[stage]:
                yield Move(stage, Work.WEIGHT, free, free + times.weight[stage])

    def fits(self, rank: int, stage: int) -> bool:
        """Whether a rank can hold one more forward, and then still those that come before any backward frees it.

        A microbatch's backward comes after its forwards on all stages, and microbatches keep their order; so all that
        is held of one and of those behind it is held until it has been through the rank's other stages.
        """
        task = self.task
        keeps, bound = task.keeps.input, task.memory[rank]
        if self.held[rank] + keeps[stage] > bound:
            return False
        done = [(s, self.forwards[s] + (s == stage), self.backwards[s]) for s in task.stages_of[rank]]
        return all(
            sum(keeps[s] * (f - max(first, b) if f > first else 1) for s, f, b in done) <= bound
            for _, first, _ in done
            if first <= self.forwards[stage]
        )

    def do(self, rank: int, move: Move) -> None:
        """Goes on by a move."""
        task, stage, end = self.task, move.stage, move.end
        keeps = task.keeps
        self.free[rank] = end
        match move.work:
            case Work.FORWARD:
                microbatch = self.forwards[stage]
                self.forwards[stage] += 1
                self.held[rank] += keeps.input[stage]
                if stage + 1 < task.stages:
                    self.arrived[stage + 1].append(end + task.delay(stage, stage + 1))
                else:
                    self.returned[stage].append(end)
            case Work.WEIGHT:
                microbatch = self.owed[stage].pop(0)
                self.held[rank] -= keeps.weight[stage]
            case _:
                microbatch = self.backwards[stage]
                self.backwards[stage] += 1
                if stage:
                    self.returned[stage - 1].append(end + task.delay(stage, stage - 1))
                if move.work is Work.INPUT:
                    self.owed[stage].append(microbatch)
                    self.held[rank] += keeps.weight[stage]
                self.held[rank] -= keeps.input[stage]
        self.rows[rank].append(Action(stage, move.work, microbatch))
