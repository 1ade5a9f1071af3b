"""Dependencies of actions, the one place that knows what F, B, I and W need of each other;
problems of schedules.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from attrs import frozen

from .actions import Action, Schedule, Work


class Value(NamedTuple):
    """A value that one action makes and others wait for; messages carry them."""

    gradient: bool
    """The gradient of what the stage received; else what the stage makes of it."""
    stage: int
    microbatch: int


PARTS = {Work.FORWARD: "F", Work.INPUT: "I", Work.WEIGHT: "W", Work.BACKWARD: "IW"}
"""Which parts of a stage's work an action does."""


class Cell(NamedTuple):
    """A place in the rows."""

    rank: int
    at: int


class Stuck(Exception):
    """Rows that cannot go on: the cell at which each rank waits, and for what."""

    def __init__(self, waits: Mapping[Cell, Value]) -> None:
        super().__init__(
            ", ".join(
                f"rank {rank} waits in cell {at} for {value}" for (rank, at), value in waits.items()
            )
        )
        self.waits = waits


def made_by(action: Action) -> Value | None:
    """The value that a computing action makes; none for the weight part, for which nothing
    waits.
    """
    if action.work is Work.WEIGHT:
        return None
    return Value(action.work is not Work.FORWARD, action.stage, action.microbatch)


def carried(message: Action) -> Value:
    """The value that a send or receive moves."""
    if not message.work.is_message:
        raise ValueError(f"{message} moves nothing")
    gradient = message.work in (Work.SEND_BACKWARD, Work.RECEIVE_BACKWARD)
    return Value(
        gradient, message.stage if message.work.sends else message.peer, message.microbatch
    )


def needs(action: Action, stages: int) -> tuple[Value, ...]:
    """The values that a computing action needs, those of its own rank first."""
    stage, microbatch = action.stage, action.microbatch
    if action.work is Work.FORWARD:
        return (Value(False, stage - 1, microbatch),) if stage else ()
    if action.work is Work.WEIGHT:
        return (Value(True, stage, microbatch),)
    own = Value(False, stage, microbatch)
    return (own, Value(True, stage + 1, microbatch)) if stage + 1 < stages else (own,)


def circles(waits: Mapping[int, int]) -> list[tuple[int, ...]]:
    """The ranks that wait for each other in a circle, where each waits for one at most; the
    lowest rank first.
    """
    # needed only where rows are wrong, and slow to import
    from networkx import DiGraph, simple_cycles

    found: Iterator[list[int]] = simple_cycles(DiGraph([*waits.items()]))
    lowest = ((ranks, ranks.index(min(ranks))) for ranks in found)
    return sorted((*ranks[at:], *ranks[:at]) for ranks, at in lowest)


# ---- problems of a schedule, and their places


@frozen
class Problem:
    """One mistake of one row."""

    rank: int
    cell: int | None
    """Its place in the row, from 0; none where the row lacks something."""
    why: str
    help: str


def lacking(missing: Iterable[tuple[int, Action]], help: str) -> list[Problem]:
    """One problem for each rank whose row lacks some actions."""
    by_rank: dict[int, list[Action]] = {}
    for rank, action in missing:
        by_rank.setdefault(rank, []).append(action)
    return [
        Problem(rank, None, f"the row lacks {_few(by_rank[rank])}", help)
        for rank in sorted(by_rank)
    ]


def _few(actions: list[Action], most: int = 4) -> str:
    more = f" and {len(actions) - most} more" if len(actions) > most else ""
    return ", ".join(f"`{action}`" for action in actions[:most]) + more


def misplaced(cell: Cell, action: Action, schedule: Schedule) -> Problem | None:
    """An action of a stage or microbatch that there is not, or of another rank's stage."""
    stage, microbatch = action.stage, action.microbatch
    if not 0 <= stage < schedule.stages:
        why, help = f"there is no stage {stage}", f"stages are 0 to {schedule.stages - 1}"
    elif not 0 <= microbatch < schedule.microbatches:
        why, help = (
            f"there is no microbatch {microbatch}",
            f"microbatches are 0 to {schedule.microbatches - 1}",
        )
    elif schedule.stage_to_rank[stage] != cell.rank:
        why, help = (
            f"rank {cell.rank} does not have stage {stage}",
            f"rank {schedule.stage_to_rank[stage]} has it",
        )
    else:
        return None
    return Problem(*cell, f"`{action}`: {why}", help)


def circular(waits: Mapping[Cell, Cell], schedule: Schedule, help: str) -> list[Problem]:
    """One problem for each circle of ranks, given where each rank waits and for which cell."""
    cells = {cell.rank: cell for cell in waits}
    found: list[Problem] = []
    for ranks in circles({cell.rank: awaited.rank for cell, awaited in waits.items()}):
        said = [_waits(cells[rank], waits[cells[rank]], schedule) for rank in ranks]
        found.append(Problem(*cells[ranks[0]], ", ".join(said), help))
    return found


def _waits(cell: Cell, awaited: Cell, schedule: Schedule) -> str:
    waiting, other = (
        f"`{schedule.rows[rank][at]}` (rank {rank}, cell {at})" for rank, at in (cell, awaited)
    )
    return f"{waiting} waits for {other}"
