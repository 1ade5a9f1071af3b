"""Does the rows of a pipeline's schedule: each rank its actions in order, on what it holds and what it is sent.

Purpose: the microbatches of a step as its ranks do them.  What crosses from stage to stage lies in slots of a rank; an
action takes what it needs, and then it is gone; messages between two ranks arrive in the order in which they are sent.
So what is not there when it is read is an error, and what is there but wrong comes out in the results.
Non-goals: what a stage does (`staged`); time; rows that wait for each other because a send blocks, for which
`schedules.rendezvous` is asked.
"""

from collections import defaultdict, deque
from typing import TypeAlias

from ..ir import Region
from ..schedules.actions import Action, Schedule, Work
from ..schedules.rendezvous import SENDS, rendezvous
from ..schedules.waits import Cell
from .cut import shares
from .machine import Env, Machine
from .staged import Staged, Sums, result
from .world import World

Slot: TypeAlias = tuple[str, int, int]
"""What lies there, for which stage and which microbatch."""

ENTERING, RETURNING, KEPT, LEFT = "what enters", "the gradient of what leaves", "what `F` keeps", "what `I` leaves"

TAKEN = {
    Work.FORWARD: (ENTERING, 0),
    Work.BACKWARD: (KEPT, 0),
    Work.INPUT: (KEPT, 0),
    Work.WEIGHT: (LEFT, 0),
    Work.SEND_FORWARD: (ENTERING, 1),
    Work.SEND_BACKWARD: (RETURNING, -1),
}
"""What an action takes first, and whose it is: that of its stage or of the one that it sends to."""

RECEIVED = {Work.RECEIVE_FORWARD: ENTERING, Work.RECEIVE_BACKWARD: RETURNING}


class RowsError(Exception):
    """Rows that cannot be done; says on which rank, in which cell, and why."""


def run_rows(machine: Machine, region: Region, outer: Env, freed: Cell | None = None) -> Env:
    """The results of the microbatches `region`.  What the cell `freed` would take is gone before.  Raises RowsError."""
    pipeline = machine.program.pipeline
    assert pipeline, "verify: no pipeline"
    assert pipeline.schedule, "verify: no rows"
    worlds: dict[tuple[tuple[str, int], ...], World] = {}
    stages = [
        Staged(machine, region, outer, share, rank, worlds)
        for share, rank in zip(shares(machine.program, pipeline, region), pipeline.homes, strict=True)
    ]
    rows = _Rows(machine, pipeline.schedule, stages, freed)
    rows.run()
    ends = zip(region.yields, region.results, strict=True)
    return {value.name: result(machine, stages, rows.sums, end.name, value.type) for end, value in ends}


class _Rows:
    def __init__(self, machine: Machine, schedule: Schedule, stages: list[Staged], freed: Cell | None) -> None:
        self._machine, self._schedule, self._stages, self._freed = machine, schedule, stages, freed
        self._slots: list[dict[Slot, Env]] = [{} for _ in schedule.rows]
        self._mail = defaultdict[tuple[int, int], deque[Env]](deque)
        self._cell = Cell(0, 0)
        self.sums: Sums = {}

    def run(self) -> None:
        """Does all rows."""
        at = [0] * self._schedule.ranks
        while any(self._advances(rank, at) for rank in range(len(at))):
            pass
        for rank, row in enumerate(self._schedule.rows):
            if at[rank] < len(row):
                self._cell = Cell(rank, at[rank])
                raise self._error("nothing is sent that it could receive")
        for (source, target), values in self._mail.items():
            if values:
                raise RowsError(f"rank {source} sends rank {target} what that does not receive")
        for problem in rendezvous(self._schedule):
            raise RowsError(f"rank {problem.rank}, cell {problem.cell}: {problem.why}")

    def _advances(self, rank: int, at: list[int]) -> bool:
        """Does what can be done of a row, and says whether that is anything."""
        row, begin = self._schedule.rows[rank], at[rank]
        while at[rank] < len(row):
            self._cell = Cell(rank, at[rank])
            if not self._done(row[at[rank]]):
                break
            at[rank] += 1
        return at[rank] > begin

    # ---- actions

    def _done(self, action: Action) -> bool:
        """Does an action, unless it waits for a message."""
        rank, stage, work = self._cell.rank, action.stage, action.work
        if self._home(stage) != rank:
            raise self._error("the rank does not have this stage")
        if kind := RECEIVED.get(work):
            arrived = self._mail[self._peer(action), rank]
            if arrived:
                self._put((kind, stage, action.microbatch), arrived.popleft())
                return True
            return False
        first = work is Work.FORWARD and not stage
        taken = {} if first else self._taken(action)
        if work in SENDS:
            self._mail[rank, self._peer(action)].append(taken)
        else:
            self._compute(action, taken)
        return True

    def _home(self, stage: int) -> int:
        homes = self._schedule.homes
        if not 0 <= stage < len(homes):
            raise self._error(f"there is no stage {stage}")
        return homes[stage]

    def _peer(self, action: Action) -> int:
        """The other end of a message."""
        ahead = (action.work in SENDS) == (action.work in (Work.SEND_FORWARD, Work.RECEIVE_FORWARD))
        return self._home(action.stage + (1 if ahead else -1))

    def _compute(self, action: Action, taken: Env) -> None:
        stage, work, microbatch = action.stage, action.work, action.microbatch
        staged = self._stages[stage]
        part = staged.parts[work]
        match work:
            case Work.FORWARD:
                entering, to = taken.values(), (ENTERING, stage + 1, microbatch)
                taken = staged.given(microbatch)
            case _:
                entering = self._take((RETURNING, stage, microbatch)).values() if part.takes else ()
                to = (RETURNING, stage - 1, microbatch)
        env = staged.run(part, taken, entering, microbatch)
        if part.gives:
            self._put(to, {str(place): env[name] for place, name in enumerate(part.gives)})
        if work is Work.FORWARD:
            self._put((KEPT, stage, microbatch), env)
        if work is Work.INPUT:
            self._put((LEFT, stage, microbatch), env)
        self._add(stage, staged.sums(part, env))

    def _add(self, stage: int, parts: Env) -> None:
        for name, part in parts.items():
            before = self.sums.get((stage, name))
            self.sums[stage, name] = self._machine.total([before, part]) if before else part

    # ---- slots

    def _taken(self, action: Action) -> Env:
        kind, ahead = TAKEN[action.work]
        slot = kind, action.stage + ahead, action.microbatch
        if self._cell == self._freed:
            self._slots[self._cell.rank].pop(slot, None)
        return self._take(slot)

    def _take(self, slot: Slot) -> Env:
        values = self._slots[self._cell.rank].pop(slot, None)
        if values is None:
            raise self._error(f"{_words(slot)} is not there")
        return values

    def _put(self, slot: Slot, values: Env) -> None:
        slots = self._slots[self._cell.rank]
        if slot in slots:
            raise self._error(f"{_words(slot)} is there already, and nothing has taken it")
        slots[slot] = values

    def _error(self, why: str) -> RowsError:
        rank, at = self._cell
        return RowsError(f"rank {rank}, cell {at}, `{self._schedule.rows[rank][at]}`: {why}")


def _words(slot: Slot) -> str:
    kind, stage, microbatch = slot
    return f"{kind} of stage {stage}, microbatch {microbatch}"
