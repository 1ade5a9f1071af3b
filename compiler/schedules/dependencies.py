"""Dependencies of actions, the one place that knows the values that F, B, I and W take from each
other; problems of schedules.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from attrs import frozen

from .actions import Action, Schedule, Work


class Value(NamedTuple):
    """A value that one action makes and others wait for; messages carry them."""

    gradient: bool
    """Whether it is the gradient of the value that the stage received; else it is the stage's
    result.
    """
    stage: int
    microbatch: int


PARTS = {Work.FORWARD: "F", Work.INPUT: "I", Work.WEIGHT: "W", Work.BACKWARD: "IW"}
"""The parts of a stage's work that an action does."""


class Cell(NamedTuple):
    """A place in the rows."""

    rank: int
    place: int


class Stuck(Exception):
    """Rows that cannot go on: the cell where each rank waits, and the value that it waits for."""

    def __init__(self, waits: Mapping[Cell, Value]) -> None:
        words: list[str] = []
        for cell, value in waits.items():
            words.append(f"rank {cell.rank} waits in cell {cell.place} for {value}")
        super().__init__(", ".join(words))
        self.waits = waits


def get_result(action: Action) -> Value | None:
    """The value that a computing action makes; None for the weight part, since nothing waits for
    it.
    """
    if action.work is Work.WEIGHT:
        return None
    return Value(action.work is not Work.FORWARD, action.stage, action.microbatch)


def get_payload(message: Action) -> Value:
    """The value that a send or receive moves.  Raises ValueError for an action that computes."""
    if not message.work.is_message:
        raise ValueError(f"{message} moves nothing")
    gradient = message.work in (Work.SEND_BACKWARD, Work.RECEIVE_BACKWARD)
    maker = message.stage if message.work.sends else message.peer
    return Value(gradient, maker, message.microbatch)


def get_inputs(action: Action, stages: int) -> tuple[Value, ...]:
    """The values that a computing action needs, the values of its own rank first."""
    stage, microbatch = action.stage, action.microbatch
    if action.work is Work.FORWARD:
        return (Value(False, stage - 1, microbatch),) if stage else ()
    if action.work is Work.WEIGHT:
        return (Value(True, stage, microbatch),)
    activation = Value(False, stage, microbatch)
    if stage + 1 >= stages:
        return (activation,)
    return activation, Value(True, stage + 1, microbatch)


def circles(waits: Mapping[int, int]) -> list[tuple[int, ...]]:
    """The circles of ranks that wait for each other, the lowest rank of each first.

    Each rank waits for one other at most.
    """
    # needed only where rows are wrong, and slow to import
    from networkx import DiGraph, simple_cycles

    cycles: Iterator[list[int]] = simple_cycles(DiGraph([*waits.items()]))
    rotated: list[tuple[int, ...]] = []
    for ranks in cycles:
        lowest = ranks.index(min(ranks))
        rotated.append((*ranks[lowest:], *ranks[:lowest]))
    return sorted(rotated)


# ---- problems of a schedule, and their places


@frozen
class Problem:
    """One mistake of one row."""

    rank: int
    cell: int | None
    """The place of its cell in the row, from 0; None where the row lacks something."""
    why: str
    help: str


def problems_of_lacking_actions(missing: Iterable[tuple[int, Action]], help: str) -> list[Problem]:
    """One problem for each rank whose row lacks some actions."""
    by_rank: dict[int, list[Action]] = {}
    for rank, action in missing:
        by_rank.setdefault(rank, []).append(action)
    problems: list[Problem] = []
    for rank in sorted(by_rank):
        problems.append(Problem(rank, None, f"the row lacks {_few(by_rank[rank])}", help))
    return problems


def _few(actions: list[Action], most: int = 4) -> str:
    """The first actions in words, and how many more there are."""
    words = ", ".join(f"`{action}`" for action in actions[:most])
    if len(actions) > most:
        words += f" and {len(actions) - most} more"
    return words


def find_misplacement(cell: Cell, action: Action, schedule: Schedule) -> Problem | None:
    """The problem of an action whose stage or microbatch does not exist, or whose stage is
    another rank's; None for other actions.
    """
    stage, microbatch = action.stage, action.microbatch
    if not 0 <= stage < schedule.stages:
        why = f"there is no stage {stage}"
        help = f"stages are 0 to {schedule.stages - 1}"
    elif not 0 <= microbatch < schedule.microbatches:
        why = f"there is no microbatch {microbatch}"
        help = f"microbatches are 0 to {schedule.microbatches - 1}"
    elif schedule.stage_to_rank[stage] != cell.rank:
        why = f"rank {cell.rank} does not have stage {stage}"
        help = f"rank {schedule.stage_to_rank[stage]} has it"
    else:
        return None
    return Problem(*cell, f"`{action}`: {why}", help)


def problems_of_circles(waits: Mapping[Cell, Cell], schedule: Schedule, help: str) -> list[Problem]:
    """One problem for each circle of ranks; `waits` has the cell where each rank waits, and the
    cell that it waits for.
    """
    cells = {cell.rank: cell for cell in waits}
    problems: list[Problem] = []
    for ranks in circles({cell.rank: awaited.rank for cell, awaited in waits.items()}):
        sentences = [_waits(cells[rank], waits[cells[rank]], schedule) for rank in ranks]
        problems.append(Problem(*cells[ranks[0]], ", ".join(sentences), help))
    return problems


def _waits(cell: Cell, awaited: Cell, schedule: Schedule) -> str:
    return f"{_cell_words(cell, schedule)} waits for {_cell_words(awaited, schedule)}"


def _cell_words(cell: Cell, schedule: Schedule) -> str:
    return f"`{schedule.rows[cell.rank][cell.place]}` (rank {cell.rank}, cell {cell.place})"
