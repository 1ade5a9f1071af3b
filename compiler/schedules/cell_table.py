"""The cells of a schedule as arrays of numbers, for what is asked of all of them at once.

This imports numpy, which takes longer than many commands: what needs it imports it then.
"""

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise, starmap
from typing import Any, cast

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from .actions import Action, Schedule, Work
from .dependencies import Cell, Value, needs

Numbers = NDArray[np.int64]


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

    @property
    def actions(self) -> list[Action]:
        """The actions themselves."""
        rows = self.schedule.rows
        return [rows[rank][at] for rank, at in zip(self.rank.tolist(), self.at.tolist(), strict=True)]

    @cached_property
    def rows(self) -> tuple[range, ...]:
        """For each rank which of these cells are its own."""
        ends = np.searchsorted(self.rank, np.arange(self.schedule.ranks + 1)).tolist()
        return tuple(starmap(range, pairwise(ends)))

    @cached_property
    def computing(self) -> "CellTable":
        """Those that are no messages."""
        return self.where(self.each(lambda action: not action.work.is_message))

    @cached_property
    def messages(self) -> "CellTable":
        """The others."""
        return self.where(self.each(lambda action: action.work.is_message))

    @property
    def nothing(self) -> int:
        """How many values there are, whose numbers are below it."""
        return 2 * self.schedule.stages * self.schedule.microbatches

    def where(self, chosen: NDArray[np.bool_] | slice) -> "CellTable":
        """Some of the cells."""
        rank, at, microbatch, like = (it[chosen] for it in (self.rank, self.at, self.microbatch, self.like))
        left = np.flatnonzero(np.bincount(like, minlength=len(self.kinds)))
        kinds = tuple(self.kinds[kind] for kind in left)
        return CellTable(self.schedule, rank, at, microbatch, np.searchsorted(left, like), kinds)

    def row(self, rank: int) -> "CellTable":
        """Those of a rank."""
        own = self.rows[rank]
        return self.where(slice(own.start, own.stop))

    @property
    def firsts(self) -> NDArray[np.bool_]:
        """Which are the first of their kind."""
        firsts = np.zeros(len(self.like), dtype=bool)
        firsts[np.unique(self.like, return_index=True)[1]] = True
        return firsts

    def largest(self, sizes: NDArray[Any]) -> list[int]:
        """The number of the first cell of each kind for which a size is largest; kinds as they first occur."""
        kinds = (np.flatnonzero(self.like == kind) for kind in dict.fromkeys(self.like.tolist()))
        return [int(cells[sizes[cells].argmax()]) for cells in kinds]

    def cell(self, number: int) -> Cell:
        """One of them by number."""
        return Cell(int(self.rank[number]), int(self.at[number]))

    def each(self, said: Callable[[Action], float]) -> NDArray[Any]:
        """What is said of each cell's action, whatever its microbatch."""
        return np.array([said(action) for action in self.kinds], dtype=None if self.kinds else np.int64)[self.like]

    def values(self, which: Callable[[Action], Value | None]) -> Numbers:
        """The number of a value of each cell, `nothing` where it has none."""
        firsts = map(which, self.kinds)
        found = np.array([self.number(value) if value else -1 for value in firsts], dtype=np.int64)[self.like]
        return np.where(found < 0, self.nothing, found + self.microbatch)

    @cached_property
    def needed(self) -> tuple[Numbers, Numbers]:
        """The first and the second value that each cell needs, of those that compute."""
        needed = {action: (*needs(action, self.schedule.stages), None, None) for action in self.kinds}
        return self.values(lambda action: needed[action][0]), self.values(lambda action: needed[action][1])

    def elsewhere(self, values: Numbers) -> NDArray[np.bool_]:
        """Of a value for each cell, whether another rank makes it."""
        home = np.array([*self.schedule.stage_to_rank * 2, -1])[values // self.schedule.microbatches]
        return (home >= 0) & (home != self.rank)

    def number(self, value: Value) -> int:
        """Values are numbered stage by stage, gradients after the others."""
        stage = value.gradient * self.schedule.stages + value.stage
        return stage * self.schedule.microbatches + value.microbatch

    def value(self, number: int) -> Value:
        """The value of a number."""
        stage, microbatch = divmod(number, self.schedule.microbatches)
        gradient, stage = divmod(stage, self.schedule.stages)
        return Value(bool(gradient), stage, microbatch)


def before(added: NDArray[Any]) -> NDArray[Any]:
    """What there is before each cell, where each adds so much."""
    return np.concatenate([np.zeros_like(added[:1]), np.cumsum(added)[:-1]])


def cell_table(schedule: Schedule) -> CellTable:
    """All cells of a schedule."""
    if cell_table not in schedule.known:
        schedule.known[cell_table] = _made(schedule)
    return cast(CellTable, schedule.known[cell_table])


def _made(schedule: Schedule) -> CellTable:
    works, lengths = [*Work], [*map(len, schedule.rows)]
    actions = [action for row in schedule.rows for action in row]
    codes = np.array([action.stage * len(works) + action.work.number for action in actions], dtype=np.int64)
    kinds, like = np.unique(codes, return_inverse=True)
    found: list[int] = kinds.tolist()
    return CellTable(
        schedule,
        rank=np.repeat(np.arange(len(lengths)), lengths),
        at=np.concatenate([np.arange(length) for length in lengths]),
        microbatch=np.array([action.microbatch for action in actions], dtype=np.int64),
        like=like,
        kinds=tuple(Action(kind // len(works), works[kind % len(works)], 0) for kind in found),
    )
