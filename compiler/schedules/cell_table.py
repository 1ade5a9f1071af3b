"""The cells of a schedule as arrays of numbers, for questions about all cells at once.

This imports numpy, which takes longer than many commands run: functions that need this module
import it when they run.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, SupportsIndex

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from .actions import Action, Row, Schedule, Work, once
from .dependencies import PARTS, Cell, Value, get_inputs, get_payload, get_result

Numbers = NDArray[np.int64]
WORKS = tuple(Work)


@frozen(eq=False, slots=False)
class CellTable:
    """Cells, in the order of ranks and of their rows.

    at    the place of each cell in its row
    like  for each cell the number in `kinds` of its action, whose microbatch there is 0
    """

    schedule: Schedule
    rank: Numbers
    place: Numbers
    microbatch: Numbers
    kind: Numbers
    kinds: tuple[Action, ...]

    def row(self, rank: int) -> Numbers:
        """The numbers of the cells of a rank."""
        return np.flatnonzero(self.rank == rank)

    def select(self, chosen: NDArray[np.bool_] | Numbers) -> "CellTable":
        """Some of the cells."""
        return CellTable(
            self.schedule,
            rank=self.rank[chosen],
            place=self.place[chosen],
            microbatch=self.microbatch[chosen],
            kind=self.kind[chosen],
            kinds=self.kinds,
        )

    def cell(self, number: SupportsIndex) -> Cell:
        """A cell by its number."""
        return Cell(int(self.rank[number]), int(self.place[number]))

    def action(self, number: SupportsIndex) -> Action:
        """The action of a cell."""
        kind = self.kinds[int(self.kind[number])]
        return Action(kind.stage, kind.work, int(self.microbatch[number]))

    @cached_property
    def actions(self) -> list[Action]:
        """The action of each cell."""
        kinds: Iterator[Action] = map(self.kinds.__getitem__, self.kind.tolist())
        columns = zip(kinds, self.microbatch.tolist(), strict=True)
        return [Action(kind.stage, kind.work, microbatch) for kind, microbatch in columns]

    @property
    def counts(self) -> Counter[tuple[int, Work]]:
        """The number of cells for each stage and each kind of work."""
        numbers: list[int] = np.bincount(self.kind, minlength=len(self.kinds)).tolist()
        counts: Counter[tuple[int, Work]] = Counter()
        for kind, count in zip(self.kinds, numbers, strict=True):
            counts[kind.stage, kind.work] = count
        return counts

    def largest(self, sizes: NDArray[Any]) -> list[int]:
        """The number of the first cell of each kind with the kind's largest size; kinds in the
        order of their first cells.
        """
        numbers: list[int] = []
        for kind in dict.fromkeys(self.kind.tolist()):
            cells = np.flatnonzero(self.kind == kind)
            numbers.append(int(cells[sizes[cells].argmax()]))
        return numbers

    def map_kinds(self, number_of: Callable[[Action], float]) -> NDArray[Any]:
        """A number for each cell by its action, whatever its microbatch."""
        return np.array([*map(number_of, self.kinds), 0])[self.kind]

    @cached_property
    def are_messages(self) -> NDArray[np.bool_]:
        """Which cells compute nothing."""
        return self.map_kinds(lambda action: action.work.is_message) > 0

    @cached_property
    def are_sends(self) -> NDArray[np.bool_]:
        """Which cells are messages that leave their rank."""
        return self.map_kinds(lambda action: action.work.sends) > 0

    @cached_property
    def is_own_work(self) -> NDArray[np.bool_]:
        """Which cells have a stage of their rank, and a microbatch that exists."""
        owner = dict(enumerate(self.schedule.stage_to_rank))
        has_own_stage = self.map_kinds(lambda action: owner.get(action.stage, -1)) == self.rank
        exists = (self.microbatch >= 0) & (self.microbatch < self.schedule.microbatches)
        return has_own_stage & exists

    @property
    def are_whole(self) -> bool:
        """Whether each stage does each part of its work once for each microbatch, on its rank."""
        return bool(np.all(self.is_own_work | self.are_messages)) and all(map(self._once, "FIW"))

    def _once(self, part: str) -> bool:
        """Whether a part of each stage's work is done once for each microbatch."""

        def stage_of(action: Action) -> Value | None:
            return Value(False, action.stage, 0) if part in PARTS.get(action.work, "") else None

        counts = np.bincount(self.values(stage_of), minlength=self.nothing + 1)
        return bool(np.all(counts[: self.nothing // 2] == 1))

    @property
    def nothing(self) -> int:
        """The number of values; the numbers of values are below it, stage by stage, gradients
        last.
        """
        return 2 * self.schedule.stages * self.schedule.microbatches

    def values(self, which: Callable[[Action], Value | None]) -> Numbers:
        """The number of a value of each cell, `nothing` where it has none."""
        stages, microbatches = self.schedule.stages, self.schedule.microbatches
        number_by_kind: list[int] = []
        for action in self.kinds:
            value = which(action)
            if value and 0 <= value.stage < stages:
                number_by_kind.append(value.gradient * stages + value.stage)
            else:
                number_by_kind.append(-1)
        numbers = np.array([*number_by_kind, -1])[self.kind]
        exists = (numbers >= 0) & (self.microbatch >= 0) & (self.microbatch < microbatches)
        return np.where(exists, numbers * microbatches + self.microbatch, self.nothing)

    def value(self, number: int) -> Value:
        """The value of a number."""
        stage, microbatch = divmod(number, self.schedule.microbatches)
        return Value(stage >= self.schedule.stages, stage % self.schedule.stages, microbatch)

    def number(self, value: Value) -> int:
        """The number of a value."""
        stage = value.gradient * self.schedule.stages + value.stage
        return stage * self.schedule.microbatches + value.microbatch

    @cached_property
    def needed(self) -> tuple[Numbers, Numbers]:
        """The first and the second value that each cell needs to compute."""
        needed: dict[Action, tuple[Value | None, ...]] = {}
        for kind in self.kinds:
            values = () if kind.work.is_message else get_inputs(kind, self.schedule.stages)
            needed[kind] = (*values, None, None)
        first = self.values(lambda action: needed[action][0])
        second = self.values(lambda action: needed[action][1])
        return first, second

    @property
    def message_values(self) -> Numbers:
        """The number of the value that each message moves, `nothing` for other cells."""
        return self.values(lambda action: get_payload(action) if action.work.is_message else None)

    @cached_property
    def makers(self) -> Numbers:
        """For each value the number of the cell that makes it."""
        return self.where_of(self.values(get_result), ~self.are_messages)

    @property
    def need_later(self) -> bool:
        """Whether any cell needs a value that its own rank makes later."""
        cells = np.arange(len(self.rank))
        for values in self.needed:
            if np.any((self.makers[values] > cells) & ~self.is_made_elsewhere(values)):
                return True
        return False

    def is_made_elsewhere(self, values: Numbers) -> NDArray[np.bool_]:
        """Whether another rank makes a value, given one for each cell."""
        owner = np.array([*self.schedule.stage_to_rank * 2, -1])[
            values // self.schedule.microbatches
        ]
        return (owner >= 0) & (owner != self.rank)

    def where_of(self, values: Numbers, chosen: NDArray[np.bool_]) -> Numbers:
        """For each value the number of the chosen cell that has it, -1 where none has."""
        numbers = np.full(self.nothing + 1, -1)
        numbers[values[chosen]] = np.flatnonzero(chosen)
        numbers[self.nothing] = -1
        return numbers


@once
def cell_table(schedule: Schedule) -> CellTable:
    """All cells of a schedule."""
    lengths = [*map(len, schedule.rows)]
    actions = [*chain.from_iterable(schedule.rows)]
    return make_table(
        schedule,
        rank=np.repeat(np.arange(len(lengths)), lengths),
        places=np.concatenate([np.arange(length) for length in lengths]),
        microbatch=np.array([action.microbatch for action in actions], dtype=np.int64),
        codes=np.array([*map(code, actions)], dtype=np.int64),
    )


def code(action: Action) -> int:
    """A number for its stage and work."""
    return action.stage * len(WORKS) + action.work.number


def make_table(
    schedule: Schedule, rank: Numbers, places: Numbers, microbatch: Numbers, codes: Numbers
) -> CellTable:
    """The cells whose stage and work have these codes."""
    distinct_codes, like = np.unique(codes, return_inverse=True)
    numbers: list[int] = distinct_codes.tolist()
    kinds: list[Action] = []
    numbers: list[int] = distinct_codes.tolist()
    for number in numbers:
        stage, work = divmod(number, len(WORKS))
        kinds.append(Action(stage, WORKS[work], 0))
    return CellTable(schedule, rank, places, microbatch, like, tuple(kinds))


def message_groups(cells: CellTable) -> tuple[Row, ...]:
    """Groups of messages between the same two ranks that are neighbours in both rows; messages of
    `cells` are matched and in order.

    NCCL has one kernel for messages that begin as one, which is done when all of them are, and does
    not promise that they go on by themselves.  So a group is the same at both its ends; nothing
    lies between its messages on either rank, so that rows which are parts of one order of single
    messages are parts of one order of groups.  `rendezvous` proves it of the rows.
    """
    numbers = np.flatnonzero(cells.are_messages)
    moved = cells.message_values[numbers]
    ends = [*np.flatnonzero(~_joins(cells, numbers, moved)).tolist(), len(numbers)]
    groups: list[Row] = []
    for start, end in pairwise(ends):
        if end - start > 1:
            groups.append(tuple(map(cells.action, numbers[start:end])))
    return tuple(groups)


def _joins(cells: CellTable, numbers: Numbers, moved: Numbers) -> NDArray[np.bool_]:
    """Which messages begin with the one before, given the values that all move."""
    rank = cells.rank[numbers]
    stages = cells.map_kinds(lambda action: action.peer if action.work.is_message else 0)[numbers]
    peer = np.array(cells.schedule.stage_to_rank)[stages]
    beside = (
        (np.diff(numbers, prepend=-2) == 1)
        & (np.diff(rank, prepend=-1) == 0)
        & (np.diff(peer, prepend=-1) == 0)
    )
    before = np.roll(moved, 1)
    pairs = (np.minimum(moved, before) * cells.nothing + np.maximum(moved, before))[beside]
    _, which, ends = np.unique(pairs, return_inverse=True, return_counts=True)
    joins = np.zeros(len(numbers), dtype=bool)
    joins[beside] = ends[which] == 2
    return joins
