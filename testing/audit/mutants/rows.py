"""Mistakes in the rows of a pipeline's schedule: what is done when, for which microbatch, and what
is sent to whom.

Non-goals: exchanging actions of which neither needs the other, which does nothing; sums over stages
(`stages`).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TypeAlias

from attrs import evolve

from ....compiler.ir import Program
from ....compiler.schedules.actions import Action, Row, Schedule, Work
from ....compiler.schedules.dependencies import Cell
from .edits import Mutant

Found: TypeAlias = Iterator[tuple[str, Schedule]]
"""Words for each mistake, and the rows with it."""

RECEIVES = {Work.SEND_FORWARD: Work.RECEIVE_FORWARD, Work.SEND_BACKWARD: Work.RECEIVE_BACKWARD}
TURNED = {
    Work.SEND_FORWARD: Work.SEND_BACKWARD,
    Work.SEND_BACKWARD: Work.SEND_FORWARD,
    Work.RECEIVE_FORWARD: Work.RECEIVE_BACKWARD,
    Work.RECEIVE_BACKWARD: Work.RECEIVE_FORWARD,
}
NEXT = {
    Work.FORWARD: (Work.SEND_FORWARD, Work.BACKWARD, Work.INPUT),
    Work.BACKWARD: (Work.SEND_BACKWARD,),
    Work.INPUT: (Work.SEND_BACKWARD, Work.WEIGHT),
    Work.RECEIVE_FORWARD: (Work.FORWARD,),
    Work.RECEIVE_BACKWARD: (Work.BACKWARD, Work.INPUT),
}
"""The actions that take what an action leaves to its own stage."""


def _with(schedule: Schedule, rank: int, row: Sequence[Action]) -> Schedule:
    """With another row; each message begins alone, so that groups of the right rows refuse none."""
    return evolve(
        schedule, rows=(*schedule.rows[:rank], tuple(row), *schedule.rows[rank + 1 :]), groups=()
    )


def _without(row: Row, *at: int) -> list[Action]:
    return [action for i, action in enumerate(row) if i not in at]


def _twice(row: Row, at: int) -> list[Action]:
    return [*row[: at + 1], *row[at:]]


def _set(row: Row, changes: dict[int, Action]) -> list[Action]:
    return [changes.get(i, action) for i, action in enumerate(row)]


def _exchanged(schedule: Schedule) -> Found:
    """An action and one that takes what it leaves."""
    for rank, at, action in schedule.cells():
        row = schedule.rows[rank]
        for other in range(at + 1, len(row)):
            if _takes(row[other], action):
                wrong = _set(row, {at: row[other], other: action})
                yield (
                    f"`{action}` and `{row[other]}` of rank {rank} exchanged",
                    _with(schedule, rank, wrong),
                )
                break


def _takes(later: Action, action: Action) -> bool:
    same = (later.stage, later.microbatch) == (action.stage, action.microbatch)
    return same and later.work in NEXT.get(action.work, ())


def _other_microbatch(schedule: Schedule) -> Found:
    """An action is done for the next microbatch; all others are as they were."""
    for rank, at, action in _computing(schedule):
        other = evolve(action, microbatch=(action.microbatch + 1) % schedule.microbatches)
        if other != action:
            wrong = _set(schedule.rows[rank], {at: other})
            yield f"`{other}` of rank {rank} in place of `{action}`", _with(schedule, rank, wrong)


def _computing(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    return (cell for cell in schedule.cells() if not cell[2].work.is_message)


def _sending(schedule: Schedule) -> Iterator[tuple[int, int, Action, Cell]]:
    """Each send, and the cell that receives it."""
    at = {action: Cell(rank, cell) for rank, cell, action in schedule.cells()}
    for rank, cell, action in schedule.cells():
        if action.work.sends:
            to = action.stage + (1 if action.work is Work.SEND_FORWARD else -1)
            yield rank, cell, action, at[Action(to, RECEIVES[action.work], action.microbatch)]


def _done_twice(schedule: Schedule) -> Found:
    for rank, at, action in _computing(schedule):
        yield (
            f"`{action}` of rank {rank} done twice",
            _with(schedule, rank, _twice(schedule.rows[rank], at)),
        )


def _left_out(schedule: Schedule) -> Found:
    for rank, at, action in _computing(schedule):
        yield (
            f"`{action}` of rank {rank} left out",
            _with(schedule, rank, _without(schedule.rows[rank], at)),
        )


def _other_peer(schedule: Schedule) -> Found:
    """A message goes the other way, or is that of another stage of its rank."""
    for rank, at, action in schedule.cells():
        if action.work.is_message:
            stages = [stage for stage in schedule.stages_of(rank) if stage != action.stage]
            for other in (
                evolve(action, work=TURNED[action.work]),
                *(evolve(action, stage=s) for s in stages),
            ):
                wrong = _set(schedule.rows[rank], {at: other})
                yield (
                    f"`{other}` of rank {rank} in place of `{action}`",
                    _with(schedule, rank, wrong),
                )


def _lost(schedule: Schedule) -> Found:
    """At its source, at its target, or at both."""
    for rank, at, action, target in _sending(schedule):
        sent = _with(schedule, rank, _without(schedule.rows[rank], at))
        received = _without(schedule.rows[target.rank], target.place)
        yield f"`{action}` not sent", sent
        yield f"`{action}` not received", _with(schedule, target.rank, received)
        yield f"`{action}` neither sent nor received", _with(sent, target.rank, received)


def _doubled(schedule: Schedule) -> Found:
    for rank, at, action, target in _sending(schedule):
        sent = _with(schedule, rank, _twice(schedule.rows[rank], at))
        received = _twice(schedule.rows[target.rank], target.place)
        yield f"`{action}` sent twice", sent
        yield f"`{action}` sent and received twice", _with(sent, target.rank, received)


def _others_message(schedule: Schedule) -> Found:
    """Two messages that differ in their microbatches alone: exchanged, or the first one moved
    after the second.
    """
    for rank, at, action in schedule.cells():
        row = schedule.rows[rank]
        for other in range(at + 1, len(row)) if action.work.is_message else ():
            if (row[other].stage, row[other].work) == (action.stage, action.work):
                wrong = _set(row, {at: row[other], other: action})
                yield (
                    f"`{action}` and `{row[other]}` of rank {rank} change places",
                    _with(schedule, rank, wrong),
                )
                late = [*row[:at], *row[at + 1 : other + 1], action, *row[other + 1 :]]
                yield f"`{action}` of rank {rank} after `{row[other]}`", _with(schedule, rank, late)
                break


def _added(schedule: Schedule, forwards: Schedule) -> Found:
    """An action of backward is added to the forwards, at its place."""
    for rank, at, action in schedule.cells():
        own = forwards.rows[rank]
        if action not in own:
            place = sum(each in own for each in schedule.rows[rank][:at])
            yield (
                f"`{action}` done too",
                _with(forwards, rank, [*own[:place], action, *own[place:]]),
            )


FAMILIES = {
    "actions exchanged": _exchanged,
    "another microbatch": _other_microbatch,
    "action done twice": _done_twice,
    "action left out": _left_out,
    "message to or from elsewhere": _other_peer,
    "message lost": _lost,
    "message doubled": _doubled,
    "message of another microbatch": _others_message,
}
FREED = "freed one action early"
EVALUATED = "another order in evaluation"


def row_mutants(program: Program) -> Iterator[Mutant]:
    """All mutants of the rows of a program of small sizes."""
    pipeline = program.pipeline
    if not pipeline or not pipeline.schedule:
        return
    schedule, line = (
        pipeline.schedule,
        str(pipeline.settings.spans.get("schedule", program.region.span)),
    )
    for family, wrong in FAMILIES.items():
        for what, rows in wrong(schedule):
            yield Mutant(
                family, what, line, evolve(program, pipeline=evolve(pipeline, schedule=rows))
            )
    for wrong in (*FAMILIES.values(), partial(_added, schedule)):
        for what, rows in wrong(schedule.forwards):
            yield Mutant(EVALUATED, f"{what} in evaluation", line, program, evaluation=rows)
    for rank, at, action in schedule.cells():
        if _frees(action):
            what = f"what `{action}` of rank {rank} takes freed before it"
            yield Mutant(FREED, what, line, program, Cell(rank, at))


def _frees(action: Action) -> bool:
    """Whether an action takes anything from a slot for good."""
    receives = action.work in RECEIVES.values()
    return not receives and (action.work is not Work.FORWARD or action.stage > 0)
