"""Whether a schedule does the whole step, in an order that can be done."""

from collections.abc import Iterator

from .actions import Action, Schedule, Work, once
from .dependencies import (
    PARTS,
    Cell,
    Problem,
    Stuck,
    Value,
    find_misplacement,
    get_result,
    problems_of_circles,
    problems_of_lacking_actions,
)
from .timeline import Times, compute_times

Done = dict[tuple[str, int, int], Cell]
"""The cell that does each part of a stage's work for a microbatch."""


@once
def problems(schedule: Schedule) -> list[Problem]:
    """The problems of the cells; if there are none, of their order; if there are none, of the
    messages, where rows have any.

    A mistake in one of these shows in the next too, where the problem would have other words.
    Cells have an order if all messages arrive and no cell needs a value that its own rank makes
    later.
    """
    from .cell_table import cell_table  # these have numpy, which is heavy
    from .rendezvous import rendezvous

    cells = cell_table(schedule)
    if not cells.are_whole and (wrong := _cells(schedule)):
        return wrong
    has_messages = cells.are_messages.any()
    lost = rendezvous(schedule) if has_messages else []
    if has_messages and not lost and not cells.need_later:
        return []
    return _order(schedule) or lost


def _cells(schedule: Schedule) -> list[Problem]:
    """Problems of cells: each stage's forward is there once for each microbatch, and its
    backward, in one or as two parts, on its own rank.
    """
    done: Done = {}
    problems: list[Problem] = []
    for rank, place, action in schedule.cells():
        if action.work.is_message:
            continue
        cell = Cell(rank, place)
        if problem := find_misplacement(cell, action, schedule) or _again(
            cell, action, done, schedule
        ):
            problems.append(problem)
            continue
        for part in PARTS[action.work]:
            done[part, action.stage, action.microbatch] = cell
    missing: list[tuple[int, Action]] = []
    for stage, owner in enumerate(schedule.stage_to_rank):
        for action in _missing(stage, done, schedule):
            missing.append((owner, action))
    help = "each stage runs forward and backward once per microbatch"
    return [*problems, *problems_of_lacking_actions(missing, help)]


def _again(cell: Cell, action: Action, done: Done, schedule: Schedule) -> Problem | None:
    """The problem of an action that an earlier cell has done, in full or in part."""
    for part in PARTS[action.work]:
        if first := done.get((part, action.stage, action.microbatch)):
            earlier = schedule.rows[first.rank][first.place]
            why = f"`{action}`: `{earlier}` in cell {first.place} has done it"
            help = "a backward is one `B`, or one `I` and one `W`; leave one of the two cells out"
            return Problem(*cell, why, help)
    return None


def _missing(stage: int, done: Done, schedule: Schedule) -> Iterator[Action]:
    """The actions of a stage that no cell does."""
    for microbatch in range(schedule.microbatches):
        parts = "".join(part for part in "FIW" if (part, stage, microbatch) not in done)
        for work in parts.replace("IW", "B"):
            yield Action(stage, Work(work), microbatch)


def _order(schedule: Schedule) -> list[Problem]:
    """The problems of rows that wait for each other in a circle, or for themselves."""
    try:
        compute_times(schedule, Times.uniform(schedule.stages))
    except Stuck as stuck:
        makers: dict[Value | None, Cell] = {}
        for rank, place, action in schedule.cells():
            if not action.work.is_message:
                makers[get_result(action)] = Cell(rank, place)
        waits = {cell: makers[value] for cell, value in stuck.waits.items()}
        help = "none of these can go first; put what is waited for before what waits in its row"
        return problems_of_circles(waits, schedule, help)
    return []
