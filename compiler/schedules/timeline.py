"""When each action of a schedule happens if each rank does its row in order, and how long ranks wait."""

from collections.abc import Iterator

from attrs import evolve, frozen

from .actions import Action, Schedule, Work
from .dependencies import Step, Value, in_order


@frozen
class Times:
    """How long each stage's actions take, and a message between ranks; one unit for all."""

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    send: float = 0.0

    @classmethod
    def uniform(cls, stages: int, f: float = 1, b: float = 1, w: float = 1, comm: float = 0) -> "Times":
        """The same for all stages."""
        return cls((f,) * stages, (b,) * stages, (w,) * stages, comm)

    def uniform_in(self, field: str, time: float) -> "Times":
        """With one kind of time the same for all stages."""
        return evolve(self, **{field: time if field == "send" else (time,) * len(self.forward)})

    def rounded(self) -> "Times":
        """To a thousandth."""
        kinds = self.forward, self.input, self.weight
        forward, input, weight = (tuple(round(time, 3) for time in times) for times in kinds)
        return Times(forward, input, weight, round(self.send, 3))

    @property
    def are_uniform(self) -> bool:
        """Whether all stages take equally long."""
        return len({*zip(self.forward, self.input, self.weight, strict=True)}) == 1

    def of(self, action: Action) -> float:
        """How long an action takes; backward in one takes both parts."""
        match action.work:
            case Work.FORWARD:
                return self.forward[action.stage]
            case Work.INPUT:
                return self.input[action.stage]
            case Work.WEIGHT:
                return self.weight[action.stage]
            case Work.BACKWARD:
                return self.input[action.stage] + self.weight[action.stage]
            case _:
                return self.send


@frozen
class Slot:
    """An action in time."""

    action: Action
    start: float
    end: float


@frozen
class Timeline:
    """For each rank what it computes when, in order; messages are between these."""

    slots: tuple[tuple[Slot, ...], ...]

    @property
    def total(self) -> float:
        """When the last action ends."""
        return max((row[-1].end for row in self.slots if row), default=0.0)

    def busy(self, rank: int) -> float:
        """How long a rank computes."""
        return sum(slot.end - slot.start for slot in self.slots[rank])

    def idle(self, rank: int) -> float:
        """How long it does not, until the last rank is done."""
        return self.total - self.busy(rank)

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they do not compute."""
        return sum(map(self.idle, range(len(self.slots)))) / (self.total * len(self.slots)) if self.total else 0.0


def simulate(schedule: Schedule, times: Times) -> Timeline:
    """Each action begins when its rank is free and what it needs is there; messages do not hold ranks up.

    Raises Stuck where rows wait for each other in a circle.
    """
    slots: list[list[Slot]] = [[] for _ in schedule.rows]
    for step, slot in timed(schedule, times):
        slots[step.cell.rank].append(slot)
    return Timeline(tuple(map(tuple, slots)))


def timed(schedule: Schedule, times: Times) -> Iterator[tuple[Step, Slot]]:
    """Each computing action with its time, after those that it waits for; raises Stuck."""
    stage_to_rank = schedule.stage_to_rank
    free = [0.0] * schedule.ranks
    done: dict[Value, float] = {}
    for step in in_order(schedule):
        rank = step.cell.rank
        start = free[rank]
        for value in step.needs:
            start = max(start, done[value] if stage_to_rank[value.stage] == rank else done[value] + times.send)
        free[rank] = end = start + times.of(step.action)
        if step.makes:
            done[step.makes] = end
        yield step, Slot(step.action, start, end)
