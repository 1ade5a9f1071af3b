"""When each action of a schedule happens if each rank does its row in order, and how long ranks
wait.
"""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from attrs import evolve, frozen

from .actions import Action, Schedule, Work
from .dependencies import Stuck, made_by

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .cell_table import CellTable


@frozen
class Times:
    """How long each stage's actions take, and a message between ranks; one unit for all.

    cuts   messages across each cut between stages, where these differ; else all take `send`
    ready  when the weights of each stage are there; of none from the start
    """

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    send: float = 0.0
    cuts: tuple[float, ...] = ()
    ready: tuple[float, ...] = ()

    @classmethod
    def uniform(
        cls, stages: int, f: float = 1, b: float = 1, w: float = 1, comm: float = 0
    ) -> "Times":
        """The same for all stages."""
        return cls((f,) * stages, (b,) * stages, (w,) * stages, comm)

    def uniform_in(self, field: str, time: float) -> "Times":
        """With one kind of time the same for all stages."""
        return evolve(self, **{field: time if field == "send" else (time,) * len(self.forward)})

    def rounded(self) -> "Times":
        """To a thousandth."""
        kinds = self.forward, self.input, self.weight
        forward, input, weight = (tuple(round(time, 3) for time in times) for times in kinds)
        return evolve(self, forward=forward, input=input, weight=weight, send=round(self.send, 3))

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
        return (
            sum(map(self.idle, range(len(self.slots)))) / (self.total * len(self.slots))
            if self.total
            else 0.0
        )


def simulate(schedule: Schedule, times: Times) -> Timeline:
    """Each action begins when its rank is free and what it needs is there; messages do not hold
    ranks up.

    Raises Stuck where rows wait for each other in a circle.
    """
    found = timed(schedule, times)
    start, end = found.start.tolist(), found.end.tolist()
    rows = ((found.cells.row(rank).tolist(), row) for rank, row in enumerate(schedule.rows))
    return Timeline(
        tuple(
            tuple(
                Slot(it, start[cell], end[cell])
                for cell, it in zip(*row, strict=True)
                if not it.work.is_message
            )
            for row in rows
        )
    )


@frozen(eq=False)
class Timed:
    """When each cell begins and ends that computes, and their numbers in an order in which all
    can be done.
    """

    cells: "CellTable"
    start: "NDArray[Any]"
    end: "NDArray[Any]"
    order: list[int]


_Cells = Iterator[tuple[int, int, int, float, float, float, int, float]]


def timed(schedule: Schedule, times: Times) -> Timed:
    """Each computing action begins after those before it in its row and those that it waits
    for; raises Stuck.
    """
    import numpy as np

    from .cell_table import cell_table

    cells = cell_table(schedule)
    cuts = times.cuts or (times.send,) * (schedule.stages - 1)
    # by values, each gradient across the cut before its stage
    crossed = np.array([*cuts, 0.0, 0.0, *cuts, 0.0])
    ways = [
        cells.elsewhere(values) * crossed[values // schedule.microbatches]
        for values in cells.needed
    ]
    opens = cells.each(lambda action: times.ready[action.stage] if times.ready else 0.0)
    takes, makes = cells.each(times.of), cells.values(made_by)
    makes[makes == cells.nothing] += 1
    start, order = [0.0] * len(takes), list[int]()
    done = [-1.0] * cells.nothing + [0.0] * 2  # when each value is there; negative until it is made
    waits: dict[int, dict[int, int]] = {}  # for each value the cell at which each rank waits for it

    def row(rank: int) -> Iterator[tuple[int, int]]:
        """Does a row; stops at each value that is not there, and at which cell."""
        numbers = cells.row(rank)[~cells.are_messages[cells.row(rank)]]
        columns = (it[numbers].tolist() for it in (*cells.needed, *ways, takes, makes, opens))
        free = 0.0
        each = cast(_Cells, zip(numbers.tolist(), *columns, strict=True))
        for cell, one, other, way, other_way, time, made, opened in each:
            if done[one] < 0:
                yield one, cell
            if done[other] < 0:
                yield other, cell
            start[cell] = max(free, opened, done[one] + way, done[other] + other_way)
            free = start[cell] + time
            order.append(cell)
            done[made] = free
            if made in waits:
                ready.extend(waits.pop(made))

    rows = [*map(row, range(schedule.ranks))]
    ready = deque(range(schedule.ranks))
    while ready:
        rank = ready.popleft()
        for value, cell in islice(rows[rank], 1):
            waits.setdefault(value, {})[rank] = cell
    if waits:
        raise Stuck(
            {
                cells.cell(cell): cells.value(value)
                for value, at in waits.items()
                for cell in at.values()
            }
        )
    return Timed(cells, np.array(start), start + takes, order)
