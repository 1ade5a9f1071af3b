"""When each action of a schedule happens if each rank does its row in order, and how long ranks
wait.
"""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from attrs import evolve, frozen

from .actions import Action, Schedule, Work
from .dependencies import Cell, Stuck, Value, get_result

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .cell_table import CellTable


@frozen
class Times:
    """The times of each stage's actions, and of a message between ranks; one unit for all.

    cuts   messages across each cut between stages, where these differ; else all take `send`
    ready  when the weights of each stage are there; empty where all are there from the start
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
        """These times with one kind of time the same for all stages."""
        if field == "send":
            return evolve(self, send=time)
        return evolve(self, **{field: (time,) * len(self.forward)})

    def round_times(self) -> "Times":
        """These times, rounded to a thousandth."""
        return evolve(
            self,
            forward=_round_all(self.forward),
            input=_round_all(self.input),
            weight=_round_all(self.weight),
            send=round(self.send, 3),
        )

    @property
    def are_uniform(self) -> bool:
        """Whether all stages take equally long."""
        return len({*zip(self.forward, self.input, self.weight, strict=True)}) == 1

    def get_time(self, action: Action) -> float:
        """The time of an action; backward in one action takes the time of both parts."""
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


def _round_all(times: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(round(time, 3) for time in times)


@frozen
class Slot:
    """An action in time."""

    action: Action
    start: float
    end: float


@frozen
class Timeline:
    """The actions that each rank computes, in time and in order; messages are left out."""

    slots: tuple[tuple[Slot, ...], ...]

    @property
    def total(self) -> float:
        """When the last action ends."""
        return max((row[-1].end for row in self.slots if row), default=0.0)

    def busy(self, rank: int) -> float:
        """How long a rank computes."""
        return sum(slot.end - slot.start for slot in self.slots[rank])

    def idle(self, rank: int) -> float:
        """How long a rank does not compute, until the last rank is done."""
        return self.total - self.busy(rank)

    @property
    def bubble(self) -> float:
        """The part of all ranks' time when they do not compute."""
        if not self.total:
            return 0.0
        idle = sum(map(self.idle, range(len(self.slots))))
        return idle / (self.total * len(self.slots))


def simulate(schedule: Schedule, times: Times) -> Timeline:
    """The schedule in time: each action begins when its rank is free and its inputs are there;
    messages do not hold ranks up.

    Raises Stuck where rows wait for each other in a circle.
    """
    computed = compute_times(schedule, times)
    start, end = computed.start.tolist(), computed.end.tolist()
    slots: list[tuple[Slot, ...]] = []
    for rank, row in enumerate(schedule.rows):
        slots_of_rank: list[Slot] = []
        for cell, action in zip(computed.cells.row(rank).tolist(), row, strict=True):
            if not action.work.is_message:
                slots_of_rank.append(Slot(action, start[cell], end[cell]))
        slots.append(tuple(slots_of_rank))
    return Timeline(tuple(slots))


@frozen(eq=False)
class CellTimes:
    """When each computing cell begins and ends, and the numbers of these cells in an order that
    can be done.
    """

    cells: "CellTable"
    start: "NDArray[Any]"
    end: "NDArray[Any]"
    order: list[int]


_Cells = Iterator[tuple[int, int, int, float, float, float, int, float]]
"""For each cell of a row: its number, the numbers of the two values that it needs, the times of
their messages, its time, the number of its result, and when its stage's weights are there."""


def compute_times(schedule: Schedule, times: Times) -> CellTimes:
    """When computing actions begin: each after the actions before it in its row, and after the
    actions that make its inputs.

    Raises Stuck where rows wait for each other in a circle.
    """
    import numpy as np

    columns = _make_columns(schedule, times)
    cells = columns.cells
    start, order = [0.0] * len(columns.takes), list[int]()
    # when each value is there, negative until it is made; then two that always are
    available = [-1.0] * cells.nothing + [0.0] * 2
    waits: dict[int, dict[int, int]] = {}  # for each value the cell where each rank waits for it

    def row(rank: int) -> Iterator[tuple[int, int]]:
        """Does a row; stops at each value that is not there, with the value and the cell."""
        free = 0.0
        for cell, one, other, way, other_way, time, result, opened in columns.row(rank):
            if available[one] < 0:
                yield one, cell
            if available[other] < 0:
                yield other, cell
            start[cell] = max(free, opened, available[one] + way, available[other] + other_way)
            free = start[cell] + time
            order.append(cell)
            available[result] = free
            if result in waits:
                ready.extend(waits.pop(result))

    rows = [*map(row, range(schedule.ranks))]
    ready = deque(range(schedule.ranks))
    while ready:
        rank = ready.popleft()
        for value, cell in islice(rows[rank], 1):
            waits.setdefault(value, {})[rank] = cell
    if waits:
        values_by_cell: dict[Cell, Value] = {}
        for value, cell_by_rank in waits.items():
            for cell in cell_by_rank.values():
                values_by_cell[cells.cell(cell)] = cells.value(value)
        raise Stuck(values_by_cell)
    return CellTimes(cells, np.array(start), start + columns.takes, order)


@frozen(eq=False)
class _TimedColumns:
    """The inputs of `timed`, for all cells.

    ways   the time of the message that brings each of the two values that a cell needs
    opens  when the weights of the cell's stage are there
    makes  the number of the result; one of its own for cells whose result nothing waits for
    """

    cells: "CellTable"
    ways: "tuple[NDArray[Any], NDArray[Any]]"
    takes: "NDArray[Any]"
    makes: "NDArray[Any]"
    opens: "NDArray[Any]"

    def row(self, rank: int) -> _Cells:
        """The columns of the computing cells of a rank."""
        row = self.cells.row(rank)
        numbers = row[~self.cells.are_messages[row]]
        columns: list[list[Any]] = [numbers.tolist()]
        for column in (*self.cells.needed, *self.ways, self.takes, self.makes, self.opens):
            columns.append(column[numbers].tolist())
        return cast(_Cells, zip(*columns, strict=True))


def _make_columns(schedule: Schedule, times: Times) -> _TimedColumns:
    import numpy as np

    from .cell_table import cell_table

    cells = cell_table(schedule)
    cuts = times.cuts or (times.send,) * (schedule.stages - 1)
    # the time of a message by its value; each gradient goes across the cut before its stage
    crossed = np.array([*cuts, 0.0, 0.0, *cuts, 0.0])
    first, second = cells.needed
    first_way = cells.is_made_elsewhere(first) * crossed[first // schedule.microbatches]
    second_way = cells.is_made_elsewhere(second) * crossed[second // schedule.microbatches]
    makes = cells.values(get_result)
    makes[makes == cells.nothing] += 1
    return _TimedColumns(
        cells,
        ways=(first_way, second_way),
        takes=cells.map_kinds(times.get_time),
        makes=makes,
        opens=cells.map_kinds(lambda action: times.ready[action.stage] if times.ready else 0.0),
    )
