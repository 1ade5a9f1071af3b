"""A schedule in the making: what each rank has done, what it can do next and when.

All microbatches cost the same, so each stage takes them in order.  That loses nothing: where two
overtake each other, they can be exchanged.
"""

from collections.abc import Iterator

from attrs import define, frozen

from .actions import Action, Schedule, Work
from .feasibility import Filling, Task


@frozen
class Move:
    """A possible next action of a rank, and its time."""

    stage: int
    work: Work
    start: float
    end: float


@define
class Progress:
    """How far all stages are, and the rows that got them there."""

    task: Task
    rows: list[list[Action]]
    filling: Filling
    free: list[float]
    """When each rank has done its row."""
    arrived: list[list[float]]
    """For each stage, when the inputs of its forwards are there, as far as this is known."""
    returned: list[list[float]]
    """For each stage, when the gradients for its backwards are there."""
    owed: list[list[int]]
    """For each stage, the microbatches whose weight part is to be done."""

    @classmethod
    def begin(cls, task: Task) -> "Progress":
        """The state where nothing is done."""
        stages = range(task.stages)
        arrived: list[list[float]] = [[] for _ in stages]
        # the first stage waits for no other
        arrived[0] = [0.0] * task.microbatches
        return cls(
            task,
            rows=[[] for _ in range(task.ranks)],
            filling=Filling.begin(task),
            free=[0.0] * task.ranks,
            arrived=arrived,
            returned=[[] for _ in stages],
            owed=[[] for _ in stages],
        )

    def copy(self) -> "Progress":
        """A copy that goes on by itself."""
        return Progress(
            self.task,
            rows=[row.copy() for row in self.rows],
            filling=self.filling.copy(),
            free=self.free.copy(),
            arrived=[times.copy() for times in self.arrived],
            returned=[times.copy() for times in self.returned],
            owed=[microbatches.copy() for microbatches in self.owed],
        )

    def schedule(self) -> Schedule:
        """The rows as they are."""
        return Schedule(
            self.task.stage_to_rank, self.task.microbatches, tuple(map(tuple, self.rows))
        )

    @property
    def is_done(self) -> bool:
        """Whether nothing is left."""
        microbatches = self.task.microbatches
        if any(self.owed):
            return False
        return all(backwards == microbatches for backwards in self.filling.backwards)

    def done(self) -> tuple[tuple[int, ...], ...]:
        """How far each stage is."""
        return (
            tuple(self.filling.forwards),
            tuple(self.filling.backwards),
            tuple(map(len, self.owed)),
        )

    def when(self) -> tuple[float, ...]:
        """When each rank can go on, and when each value that is there can be used; of two orders
        that are as far, a better one has all these times earlier.
        """
        when = [*self.free]
        for stage, rank in enumerate(self.task.stage_to_rank):
            free = self.free[rank]
            for time in self.arrived[stage][self.filling.forwards[stage] :]:
                when.append(max(free, time))
            for time in self.returned[stage][self.filling.backwards[stage] :]:
                when.append(max(free, time))
        return tuple(when)

    def moves(self, rank: int) -> Iterator[Move]:
        """Possible next actions of a rank, whether or not there is memory for them (`fits`)."""
        task, filling, free = self.task, self.filling, self.free[rank]
        times, keeps = task.times, task.budget.keeps
        for stage in task.stages_of[rank]:
            f, b = filling.forwards[stage], filling.backwards[stage]
            if f < len(self.arrived[stage]):
                start = max(free, self.arrived[stage][f])
                yield Move(stage, Work.FORWARD, start, start + times.forward[stage])
            if b < len(self.returned[stage]):
                start = max(free, self.returned[stage][b])
                end = start + times.input[stage]
                # else its parts one after the other are as good
                if keeps.weight[stage] > keeps.input[stage]:
                    yield Move(stage, Work.BACKWARD, start, end + times.weight[stage])
                yield Move(stage, Work.INPUT, start, end)
            if self.owed[stage]:
                yield Move(stage, Work.WEIGHT, free, free + times.weight[stage])

    def fits(self, move: Move) -> bool:
        """Whether a move breaks no bound, now or later."""
        return self.filling.allows(move.stage, move.work)

    def do(self, rank: int, move: Move) -> None:
        """Adds a move to the rank's row, and takes note of its results."""
        task, stage, end = self.task, move.stage, move.end
        self.free[rank] = end
        match move.work:
            case Work.FORWARD:
                microbatch = self.filling.forwards[stage]
                if stage + 1 < task.stages:
                    self.arrived[stage + 1].append(end + task.delay(stage, stage + 1))
                else:
                    self.returned[stage].append(end)
            case Work.WEIGHT:
                microbatch = self.owed[stage].pop(0)
            case work:
                microbatch = self.filling.backwards[stage]
                if stage:
                    self.returned[stage - 1].append(end + task.delay(stage, stage - 1))
                if work is Work.INPUT:
                    self.owed[stage].append(microbatch)
        self.filling.do(stage, move.work)
        self.rows[rank].append(Action(stage, move.work, microbatch))
