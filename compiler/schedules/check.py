"""Whether a schedule does the whole step, in an order in which it can be done."""

from collections.abc import Iterable, Iterator, Mapping

from attrs import frozen

from .actions import Action, Schedule, Work, once
from .dependencies import PARTS, Cell, Stuck, circles, made_by
from .timeline import Times, timed


@frozen
class Problem:
    """One mistake of one row."""

    rank: int
    cell: int | None
    """Its place in the row, from 0; none where the row lacks something."""
    why: str
    help: str


Done = dict[tuple[str, int, int], Cell]
"""Where each part of a stage's work for a microbatch is done."""


@once
def problems(schedule: Schedule) -> list[Problem]:
    """All that is wrong with the cells; else with their order; else with the messages, where rows have any.

    A mistake in one of these shows in the next too, where it would be told in other words.  Cells have an order if all
    messages arrive and no cell needs what its own rank makes later.
    """
    from .cell_table import cell_table  # these have numpy, which is heavy
    from .rendezvous import rendezvous

    cells = cell_table(schedule)
    if not cells.are_whole and (wrong := _cells(schedule)):
        return wrong
    lost = rendezvous(schedule) if (has_messages := cells.are_messages.any()) else []
    return _order(schedule) or lost if lost or cells.need_later or not has_messages else []


def _cells(schedule: Schedule) -> list[Problem]:
    """Each stage's forward once for each microbatch, and its backward, in one or as two parts, on its own rank."""
    done: Done = {}
    found: list[Problem] = []
    for rank, at, action in schedule.cells():
        if action.work.is_message:
            continue
        cell = Cell(rank, at)
        if problem := misplaced(cell, action, schedule) or _again(cell, action, done, schedule):
            found.append(problem)
        else:
            done.update(((part, action.stage, action.microbatch), cell) for part in PARTS[action.work])
    missing = (
        (owner, action)
        for stage, owner in enumerate(schedule.stage_to_rank)
        for action in _missing(stage, done, schedule)
    )
    return [*found, *lacking(missing, "each stage runs forward and backward once per microbatch")]


def _again(cell: Cell, action: Action, done: Done, schedule: Schedule) -> Problem | None:
    """An action that an earlier cell has done, in full or in part."""
    for part in PARTS[action.work]:
        if first := done.get((part, action.stage, action.microbatch)):
            why = f"`{action}`: `{schedule.rows[first.rank][first.at]}` in cell {first.at} has done it"
            return Problem(*cell, why, "a backward is one `B`, or one `I` and one `W`; leave one of the two cells out")
    return None


def _missing(stage: int, done: Done, schedule: Schedule) -> Iterator[Action]:
    for microbatch in range(schedule.microbatches):
        lacks = "".join(part for part in "FIW" if (part, stage, microbatch) not in done)
        yield from (Action(stage, Work(work), microbatch) for work in lacks.replace("IW", "B"))


def _order(schedule: Schedule) -> list[Problem]:
    """Rows that wait for each other in a circle, or one for itself."""
    try:
        timed(schedule, Times.uniform(schedule.stages))
    except Stuck as stuck:
        makers = {
            made_by(action): Cell(rank, at) for rank, at, action in schedule.cells() if not action.work.is_message
        }
        waits = {cell: makers[value] for cell, value in stuck.waits.items()}
        return circular(
            waits, schedule, "none of these can go first; put what is waited for before what waits in its row"
        )
    return []


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
