"""Whether the messages in a schedule's rows all arrive, even where a send blocks until it is received.

Purpose: sends and receives beside the cells that make and need their values, matched first in first out for each two
ranks, without a deadlock.  Non-goals: which messages there are and where they best stand (`messages`).
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import groupby

from attrs import field, frozen

from .actions import Action, Row, Schedule, Work
from .messages import carried, message_of
from .problem import Problem, circular, lacking, misplaced
from .waits import Cell, Value, made_by, needs

SENDS = (Work.SEND_FORWARD, Work.SEND_BACKWARD)


@frozen
class Ends:
    """The cells in which each value is sent and received."""

    sent: dict[Value, Cell] = field(factory=dict[Value, Cell])
    received: dict[Value, Cell] = field(factory=dict[Value, Cell])

    def of(self, action: Action) -> dict[Value, Cell]:
        """The side that an action is on."""
        return self.sent if action.work in SENDS else self.received


def rendezvous(schedule: Schedule) -> list[Problem]:
    """What is wrong with the messages of a schedule whose cells and order are right.

    Messages with no computing between them in a row are one batch: all are posted at once, and the row goes on when all
    are matched.
    """
    ends = Ends()
    if found := [*_superfluous(schedule, ends), *_lacking(schedule, ends)]:
        return found
    return [*_misordered(schedule, ends)] or [*_mismatched(schedule, ends)] or _deadlocks(schedule, ends)


def _superfluous(schedule: Schedule, ends: Ends) -> Iterator[Problem]:
    """Messages that go nowhere, and those that a cell before is; the others are noted in `ends`."""
    for rank, at, action in schedule.cells():
        if not action.work.is_message:
            continue
        cell, value, known = Cell(rank, at), carried(action), ends.of(action)
        if problem := misplaced(cell, action, schedule):
            yield problem
        elif not message_of(value, schedule.homes):
            why = f"`{action}`: no other rank has the stage {'to' if action.work in SENDS else 'from'} which this goes"
            yield Problem(*cell, why, "leave this cell out")
        elif value in known:
            why = f"`{action}`: cell {known[value].at} has done it"
            yield Problem(*cell, why, "leave one of the two cells out")
        else:
            known[value] = cell


def _lacking(schedule: Schedule, ends: Ends) -> list[Problem]:
    missing: list[tuple[int, Action]] = []
    for _, _, value in _made(schedule):
        if message := message_of(value, schedule.homes):
            missing += [(message.source, message.send)] if value not in ends.sent else []
            missing += [(message.target, message.receive)] if value not in ends.received else []
    return lacking(missing, "what a stage of another rank needs is sent and received once")


def _made(schedule: Schedule) -> Iterator[tuple[Cell, Action, Value]]:
    for rank, at, action in schedule.cells():
        if not action.work.is_message and (value := made_by(action)):
            yield Cell(rank, at), action, value


def _misordered(schedule: Schedule, ends: Ends) -> Iterator[Problem]:
    """Sends before their value is made, and receives behind the cell that needs it."""
    for rank, at, action in schedule.cells():
        if action.work.is_message:
            continue
        value = made_by(action)
        if value and value in ends.sent and (cell := ends.sent[value]).at < at:
            why = f"`{schedule.rows[rank][cell.at]}` stands before `{action}`, which makes what it sends"
            yield Problem(*cell, why, f"put it behind cell {at}")
        for value in needs(action, schedule.stages):
            if schedule.homes[value.stage] != rank and (cell := ends.received[value]).at > at:
                why = f"`{schedule.rows[rank][cell.at]}` stands behind `{action}`, which needs it"
                yield Problem(*cell, why, f"put it before cell {at}")


def _mismatched(schedule: Schedule, ends: Ends) -> Iterator[Problem]:
    """For each two ranks the first receive that gets another value than it says."""
    pairs: dict[tuple[int, int], list[Value]] = defaultdict(list)
    for value, source in ends.sent.items():  # in the order of rows
        pairs[source.rank, ends.received[value].rank].append(value)
    for (source, target), values in pairs.items():
        arriving = sorted(values, key=lambda value: ends.received[value].at)
        for value, sent in zip(arriving, values, strict=True):
            if value != sent:
                cell, other = ends.received[value], ends.sent[sent]
                why = f"`{schedule.rows[target][cell.at]}` gets `{schedule.rows[source][other.at]}` (cell {other.at})"
                help = f"rank {target} must receive from rank {source} in the order in which that sends"
                yield Problem(*cell, f"{why} of rank {source}", help)
                break


def _deadlocks(schedule: Schedule, ends: Ends) -> list[Problem]:
    """Circles of ranks that have posted a batch of which a message is not matched until another's next batch is."""
    partner = {cell: ends.received[value] for value, cell in ends.sent.items()}
    partner |= {other: cell for cell, other in partner.items()}
    none: list[Cell] = []
    rest = [_batches(rank, row) for rank, row in enumerate(schedule.rows)]
    batch = [none] * schedule.ranks
    unmatched = [0] * schedule.ranks
    posted: set[Cell] = set()
    ready = deque(range(schedule.ranks))
    while ready:
        rank = ready.popleft()
        batch[rank] = next(rest[rank], none)
        unmatched[rank] = len(batch[rank])
        posted.update(batch[rank])
        for cell in batch[rank]:
            if partner[cell] in posted:
                for side in (rank, partner[cell].rank):
                    unmatched[side] -= 1
                    if not unmatched[side]:
                        ready.append(side)
    stuck = (next(cell for cell in batch[rank] if partner[cell] not in posted) for rank, n in enumerate(unmatched) if n)
    help = "each is posted when the messages before it in its row are done; put one of them earlier"
    return circular({cell: partner[cell] for cell in stuck}, schedule, help)


def _batches(rank: int, row: Row) -> Iterator[list[Cell]]:
    """The cells of messages with no computing between them."""
    for is_message, cells in groupby(enumerate(row), lambda each: each[1].work.is_message):
        if is_message:
            yield [Cell(rank, at) for at, _ in cells]
