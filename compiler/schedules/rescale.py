"""A schedule's rows for other numbers of ranks and microbatches: rows that `check` finds right stay
right.

An order without some stages or microbatches is an order still: a stage waits for the stage before
it, and so for all stages before.  An added action comes right after the action that it waits for: a
further stage right after the last one, a further microbatch when all others are done.
"""

from attrs import evolve

from .actions import Action, Row, Schedule, Work


def resize(schedule: Schedule, ranks: int, microbatches: int) -> Schedule:
    """The rows for these numbers of ranks and microbatches, without messages."""
    schedule = _without_messages(schedule)
    # the first stage and the last do work that no other stage does
    first, last = schedule.stage_to_rank[0], schedule.stage_to_rank[-1]
    schedule = _with_ranks(schedule, _choose(ranks, schedule.ranks, first, last))
    for _ in range(ranks - schedule.ranks):
        schedule = _with_stage(schedule)
    # a backward in two parts stays, if there is any
    split = _first_split_microbatch(schedule)
    schedule = _with_microbatches(schedule, _choose(microbatches, schedule.microbatches, split))
    for _ in range(microbatches - schedule.microbatches):
        schedule = _one_more(schedule)
    return schedule


def _without_messages(schedule: Schedule) -> Schedule:
    rows: list[Row] = []
    for row in schedule.rows:
        rows.append(tuple(action for action in row if not action.work.is_message))
    return evolve(schedule, rows=tuple(rows))


def _first_split_microbatch(schedule: Schedule) -> int:
    """The microbatch of the first weight part in the rows; 0 if there is none."""
    for _, _, action in schedule.cells():
        if action.work is Work.WEIGHT:
            return action.microbatch
    return 0


def _choose(count: int, total: int, *wanted: int) -> list[int]:
    """`count` of the `total` numbers in order: the `wanted` ones, and then the lowest others."""
    return sorted([*dict.fromkeys((*wanted, *range(total)))][:count])


def _with_ranks(schedule: Schedule, ranks: list[int]) -> Schedule:
    """The schedule of these ranks alone, with their stages, renumbered."""
    numbers: dict[int, int] = {}  # the new number of each stage
    stage_to_rank: list[int] = []
    for stage, rank in enumerate(schedule.stage_to_rank):
        if rank in ranks:
            numbers[stage] = len(numbers)
            stage_to_rank.append(ranks.index(rank))
    rows: list[Row] = []
    for rank in ranks:
        row = schedule.rows[rank]
        rows.append(tuple(evolve(action, stage=numbers[action.stage]) for action in row))
    return Schedule(tuple(stage_to_rank), schedule.microbatches, tuple(rows))


def _with_microbatches(schedule: Schedule, microbatches: list[int]) -> Schedule:
    """The schedule of these microbatches alone, renumbered."""
    numbers = {microbatch: number for number, microbatch in enumerate(microbatches)}
    rows: list[Row] = []
    for old_row in schedule.rows:
        row: list[Action] = []
        for action in old_row:
            if action.microbatch in numbers:
                row.append(evolve(action, microbatch=numbers[action.microbatch]))
        rows.append(tuple(row))
    return Schedule(schedule.stage_to_rank, len(microbatches), tuple(rows))


def _with_stage(schedule: Schedule) -> Schedule:
    """The schedule with one more stage, on a rank of its own."""
    stage = schedule.stages
    row: list[Action] = []
    for action in schedule.rows[schedule.stage_to_rank[-1]]:
        if (action.stage, action.work) == (stage - 1, Work.FORWARD):
            row.append(Action(stage, Work.FORWARD, action.microbatch))
            row.append(Action(stage, Work.BACKWARD, action.microbatch))
    return Schedule(
        (*schedule.stage_to_rank, schedule.ranks),
        schedule.microbatches,
        (*schedule.rows, tuple(row)),
    )


def _one_more(schedule: Schedule) -> Schedule:
    """The schedule with one more microbatch, whose actions are copies of the last one's."""
    last = schedule.microbatches - 1
    rows: list[Row] = []
    for row in schedule.rows:
        actions = [*row]
        for action in row:
            if action.microbatch == last:
                actions.append(evolve(action, microbatch=last + 1))
        rows.append(tuple(actions))
    return evolve(schedule, microbatches=last + 2, rows=tuple(rows))
