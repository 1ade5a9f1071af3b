"""Problems of a schedule, and their places."""

from collections.abc import Iterable, Mapping

from attrs import frozen

from .actions import Action, Schedule
from .dependencies import Cell, circles


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
    return [Problem(rank, None, f"the row lacks {_few(by_rank[rank])}", help) for rank in sorted(by_rank)]


def _few(actions: list[Action], most: int = 4) -> str:
    more = f" and {len(actions) - most} more" if len(actions) > most else ""
    return ", ".join(f"`{action}`" for action in actions[:most]) + more


def misplaced(cell: Cell, action: Action, schedule: Schedule) -> Problem | None:
    """An action of a stage or microbatch that there is not, or of another rank's stage."""
    stage, microbatch = action.stage, action.microbatch
    if not 0 <= stage < schedule.stages:
        why, help = f"there is no stage {stage}", f"stages are 0 to {schedule.stages - 1}"
    elif not 0 <= microbatch < schedule.microbatches:
        why, help = f"there is no microbatch {microbatch}", f"microbatches are 0 to {schedule.microbatches - 1}"
    elif schedule.stage_to_rank[stage] != cell.rank:
        why, help = f"rank {cell.rank} does not have stage {stage}", f"rank {schedule.stage_to_rank[stage]} has it"
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
    waiting, other = (f"`{schedule.rows[rank][at]}` (rank {rank}, cell {at})" for rank, at in (cell, awaited))
    return f"{waiting} waits for {other}"
