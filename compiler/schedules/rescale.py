"""A schedule's rows for other numbers of ranks and microbatches: what `check` finds right stays so.

An order without some stages or microbatches is an order still: a stage waits for the one before,
and so for all before that.  An added action is done at once by the one that it waits for: a further
stage right after the last one, a further microbatch when all others are done.
"""

from collections.abc import Iterator

from attrs import evolve

from .actions import Action, Row, Schedule, Work


def resized(schedule: Schedule, ranks: int, microbatches: int) -> Schedule:
    """The rows for these numbers of ranks and microbatches, without messages."""
    rows = tuple(
        tuple(action for action in row if not action.work.is_message) for row in schedule.rows
    )
    found = evolve(schedule, rows=rows)
    # the first stage and the last do what no other does
    ends = found.stage_to_rank[0], found.stage_to_rank[-1]
    found = _with_ranks(found, _chosen(ranks, found.ranks, *ends))
    for _ in range(ranks - found.ranks):
        found = _with_stage(found)
    # a backward in two parts stays, if there is any
    split = next(
        (action.microbatch for _, _, action in found.cells() if action.work is Work.WEIGHT), 0
    )
    found = _with_microbatches(found, _chosen(microbatches, found.microbatches, split))
    for _ in range(microbatches - found.microbatches):
        found = _one_more(found)
    return found


def _chosen(count: int, total: int, *wanted: int) -> list[int]:
    """The first `count` of `total` numbers, those that are wanted before others."""
    return sorted([*dict.fromkeys((*wanted, *range(total)))][:count])


def _with_ranks(schedule: Schedule, ranks: list[int]) -> Schedule:
    """The schedule of these ranks alone, with their stages, renumbered."""
    own = [stage for stage, rank in enumerate(schedule.stage_to_rank) if rank in ranks]
    numbers = {stage: number for number, stage in enumerate(own)}
    rows = (
        tuple(evolve(each, stage=numbers[each.stage]) for each in schedule.rows[rank])
        for rank in ranks
    )
    stage_to_rank = tuple(ranks.index(schedule.stage_to_rank[stage]) for stage in own)
    return Schedule(stage_to_rank, schedule.microbatches, tuple(rows))


def _with_microbatches(schedule: Schedule, microbatches: list[int]) -> Schedule:
    """The schedule of these microbatches alone, renumbered."""
    numbers = {microbatch: number for number, microbatch in enumerate(microbatches)}
    rows = (
        tuple(
            evolve(each, microbatch=numbers[each.microbatch])
            for each in row
            if each.microbatch in numbers
        )
        for row in schedule.rows
    )
    return Schedule(schedule.stage_to_rank, len(microbatches), tuple(rows))


def _with_stage(schedule: Schedule) -> Schedule:
    """With one more stage, on a rank of its own."""
    stage = schedule.stages
    row = (
        Action(stage, work, action.microbatch)
        for action in schedule.rows[schedule.stage_to_rank[-1]]
        if (action.stage, action.work) == (stage - 1, Work.FORWARD)
        for work in (Work.FORWARD, Work.BACKWARD)
    )
    return Schedule(
        (*schedule.stage_to_rank, schedule.ranks),
        schedule.microbatches,
        (*schedule.rows, tuple(row)),
    )


def _one_more(schedule: Schedule) -> Schedule:
    """With one more microbatch, done as the last one is."""
    last = schedule.microbatches - 1

    def copied(row: Row) -> Iterator[Action]:
        return (evolve(action, microbatch=last + 1) for action in row if action.microbatch == last)

    return evolve(
        schedule, microbatches=last + 2, rows=tuple((*row, *copied(row)) for row in schedule.rows)
    )
