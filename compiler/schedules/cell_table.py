"""The cells of a schedule as arrays of numbers, for what is asked of all of them at once.

This imports numpy, which takes longer than many commands: what needs it imports it then.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any, SupportsIndex

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from .actions import Action, Row, Schedule, Work, once
from .dependencies import PARTS, Cell, Value, carried, made_by, needs

Numbers = NDArray[np.int64]
WORKS = tuple(Work)


@frozen(eq=False, slots=False)
class CellTable:
    """Cells, in the order of ranks and of their rows.

    at    their places in the rows
    like  for each cell the action of `kinds` that it is, but for its microbatch
    """

    schedule: Schedule
    rank: Numbers
    at: Numbers
    microbatch: Numbers
    like: Numbers
    kinds: tuple[Action, ...]

    def row(self, rank: int) -> Numbers:
        """The numbers of those of a rank."""
        return np.flatnonzero(self.rank == rank)

    def where(self, chosen: NDArray[np.bool_] | Numbers) -> "CellTable":
        """Some of the cells."""
        rank, at, microbatch, like = (
            column[chosen] for column in (self.rank, self.at, self.microbatch, self.like)
        )
        return CellTable(self.schedule, rank, at, microbatch, like, self.kinds)

    def cell(self, number: SupportsIndex) -> Cell:
        """One of them by number."""
        return Cell(int(self.rank[number]), int(self.at[number]))

    def action(self, number: SupportsIndex) -> Action:
        """The action of a cell."""
        kind = self.kinds[int(self.like[number])]
        return Action(kind.stage, kind.work, int(self.microbatch[number]))

    @cached_property
    def actions(self) -> list[Action]:
        """The action of each cell."""
        kinds: Iterator[Action] = map(self.kinds.__getitem__, self.like.tolist())
        each = zip(kinds, self.microbatch.tolist(), strict=True)
        return [Action(kind.stage, kind.work, microbatch) for kind, microbatch in each]

    @property
    def counts(self) -> Counter[tuple[int, Work]]:
        """How many each stage has of each kind of work."""
        each = zip(
            self.kinds, np.bincount(self.like, minlength=len(self.kinds)).tolist(), strict=True
        )
        return Counter({(kind.stage, kind.work): count for kind, count in each})

    def largest(self, sizes: NDArray[Any]) -> list[int]:
        """The number of the first cell of each kind for which a size is largest; kinds as they
        first occur.
        """
        kinds = (np.flatnonzero(self.like == kind) for kind in dict.fromkeys(self.like.tolist()))
        return [int(cells[sizes[cells].argmax()]) for cells in kinds]

    def each(self, said: Callable[[Action], float]) -> NDArray[Any]:
        """A number for each cell by its action, whatever its microbatch."""
        return np.array([*map(said, self.kinds), 0])[self.like]

    @cached_property
    def are_messages(self) -> NDArray[np.bool_]:
        """Which compute nothing."""
        return self.each(lambda action: action.work.is_message) > 0

    @cached_property
    def are_sends(self) -> NDArray[np.bool_]:
        """Which are messages that leave."""
        return self.each(lambda action: action.work.sends) > 0

    @cached_property
    def at_home(self) -> NDArray[np.bool_]:
        """Which are of a stage of their rank, and of a microbatch that there is."""
        owner = dict(enumerate(self.schedule.stage_to_rank))
        own = self.each(lambda action: owner.get(action.stage, -1)) == self.rank
        return own & (self.microbatch >= 0) & (self.microbatch < self.schedule.microbatches)

    @property
    def are_whole(self) -> bool:
        """Whether each stage does each part of its work once for each microbatch, on its rank."""
        return bool(np.all(self.at_home | self.are_messages)) and all(map(self._once, "FIW"))

    def _once(self, part: str) -> bool:
        done = self.values(
            lambda it: Value(False, it.stage, 0) if part in PARTS.get(it.work, "") else None
        )
        return bool(np.all(np.bincount(done, minlength=self.nothing + 1)[: self.nothing // 2] == 1))

    @property
    def nothing(self) -> int:
        """How many values there are, whose numbers are below it: stage by stage, gradients last."""
        return 2 * self.schedule.stages * self.schedule.microbatches

    def values(self, which: Callable[[Action], Value | None]) -> Numbers:
        """The number of a value of each cell, `nothing` where it has none."""
        stages, microbatches = self.schedule.stages, self.schedule.microbatches
        firsts = [
            value if (value := which(action)) and 0 <= value.stage < stages else None
            for action in self.kinds
        ]
        at = np.array([it.gradient * stages + it.stage if it else -1 for it in firsts] + [-1])[
            self.like
        ]
        there = (at >= 0) & (self.microbatch >= 0) & (self.microbatch < microbatches)
        return np.where(there, at * microbatches + self.microbatch, self.nothing)

    def value(self, number: int) -> Value:
        """The value of a number."""
        stage, microbatch = divmod(number, self.schedule.microbatches)
        return Value(stage >= self.schedule.stages, stage % self.schedule.stages, microbatch)

    def number(self, value: Value) -> int:
        """The number of a value."""
        return (
            value.gradient * self.schedule.stages + value.stage
        ) * self.schedule.microbatches + value.microbatch

    @cached_property
    def needed(self) -> tuple[Numbers, Numbers]:
        """The first and the second value that each cell needs to compute."""
        stages = self.schedule.stages
        needed = {it: () if it.work.is_message else needs(it, stages) for it in self.kinds}
        return self.values(lambda it: (*needed[it], None)[0]), self.values(
            lambda it: (*needed[it], None, None)[1]
        )

    @cached_property
    def makers(self) -> Numbers:
        """For each value the number of the cell that makes it."""
        return self.where_of(self.values(made_by), ~self.are_messages)

    @property
    def need_later(self) -> bool:
        """Whether any cell needs what its own rank makes later."""
        cells = np.arange(len(self.rank))
        return any(
            np.any((self.makers[values] > cells) & ~self.elsewhere(values))
            for values in self.needed
        )

    def elsewhere(self, values: Numbers) -> NDArray[np.bool_]:
        """Whether another rank makes a value, given one for each cell."""
        owner = np.array([*self.schedule.stage_to_rank * 2, -1])[
            values // self.schedule.microbatches
        ]
        return (owner >= 0) & (owner != self.rank)

    def where_of(self, values: Numbers, chosen: NDArray[np.bool_]) -> Numbers:
        """For each value the number of the chosen cell that has it, -1 where none has."""
        found = np.full(self.nothing + 1, -1)
        found[values[chosen]] = np.flatnonzero(chosen)
        found[self.nothing] = -1
        return found


@once
def cell_table(schedule: Schedule) -> CellTable:
    """All cells of a schedule."""
    lengths = [*map(len, schedule.rows)]
    actions = [action for row in schedule.rows for action in row]
    return coded(
        schedule,
        rank=np.repeat(np.arange(len(lengths)), lengths),
        at=np.concatenate([np.arange(length) for length in lengths]),
        microbatch=np.array([action.microbatch for action in actions], dtype=np.int64),
        codes=np.array([*map(code, actions)], dtype=np.int64),
    )


def code(action: Action) -> int:
    """A number for its stage and work."""
    return action.stage * len(WORKS) + action.work.number


def coded(
    schedule: Schedule, rank: Numbers, at: Numbers, microbatch: Numbers, codes: Numbers
) -> CellTable:
    """The cells whose stage and work have these codes."""
    found, like = np.unique(codes, return_inverse=True)
    numbers: list[int] = found.tolist()
    kinds = (Action(number // len(WORKS), WORKS[number % len(WORKS)], 0) for number in numbers)
    return CellTable(schedule, rank, at, microbatch, like, tuple(kinds))


def message_groups(cells: CellTable) -> tuple[Row, ...]:
    """Messages between the same two ranks that are neighbours in both rows, which are matched and
    in order.

    NCCL has one kernel for messages that begin as one, which is done when all of them are, and does
    not promise that they go on by themselves.  So a group is the same at both its ends; nothing
    lies between its messages on either rank, so that rows which are parts of one order of single
    messages are parts of one order of groups.  `rendezvous` proves it of the rows.
    """
    numbers = np.flatnonzero(cells.are_messages)
    moved = cells.values(lambda it: carried(it) if it.work.is_message else None)[numbers]
    ends = [*np.flatnonzero(~_joins(cells, numbers, moved)).tolist(), len(numbers)]
    spans = ((start, end) for start, end in pairwise(ends) if end - start > 1)
    return tuple(tuple(map(cells.action, numbers[start:end])) for start, end in spans)


def _joins(cells: CellTable, numbers: Numbers, moved: Numbers) -> NDArray[np.bool_]:
    """Which messages begin with the one before, given the values that all move."""
    rank = cells.rank[numbers]
    stages = cells.each(lambda it: it.peer if it.work.is_message else 0)[numbers]
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
