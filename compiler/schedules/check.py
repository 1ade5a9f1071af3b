"""Whether a schedule does the whole step, in an order in which it can be done."""

from collections.abc import Iterator

from .actions import Action, Schedule, Work, once
from .dependencies import PARTS, Cell, Problem, Stuck, circular, lacking, made_by, misplaced
from .timeline import Times, timed

Done = dict[tuple[str, int, int], Cell]
"""Where each part of a stage's work for a microbatch is done."""


@once
def problems(schedule: Schedule) -> list[Problem]:
    """All that is wrong with the cells; else with their order; else with the messages, where rows
    have any.

    A mistake in one of these shows in the next too, where it would be told in other words.  Cells
    have an order if all messages arrive and no cell needs what its own rank makes later.
    """
    from .cell_table import cell_table  # these have numpy, which is heavy
    from .rendezvous import rendezvous

    cells = cell_table(schedule)
    if not cells.are_whole and (wrong := _cells(schedule)):
        return wrong
    lost = rendezvous(schedule) if (has_messages := cells.are_messages.any()) else []
    return _order(schedule) or lost if lost or cells.need_later or not has_messages else []


def _cells(schedule: Schedule) -> list[Problem]:
    """Each stage's forward once for each microbatch, and its backward, in one or as two parts,
    on its own rank.
    """
    done: Done = {}
    found: list[Problem] = []
    for rank, at, action in schedule.cells():
        if action.work.is_message:
            continue
        cell = Cell(rank, at)
        if problem := misplaced(cell, action, schedule) or _again(cell, action, done, schedule):
            found.append(problem)
        else:
            done.update(
                ((part, action.stage, action.microbatch), cell) for part in PARTS[action.work]
            )
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
            why = (
                f"`{action}`: `{schedule.rows[first.rank][first.at]}` in cell {first.at} has"
                " done it"
            )
            return Problem(
                *cell,
                why,
                "a backward is one `B`, or one `I` and one `W`; leave one of the two cells out",
            )
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
            made_by(action): Cell(rank, at)
            for rank, at, action in schedule.cells()
            if not action.work.is_message
        }
        waits = {cell: makers[value] for cell, value in stuck.waits.items()}
        return circular(
            waits,
            schedule,
            "none of these can go first; put what is waited for before what waits in its row",
        )
    return []
