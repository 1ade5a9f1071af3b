"""A schedule made for given times and memory, `schedule = auto(memory = …)`: named ones, rules,
and a search.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, product
from math import inf

from attrs import evolve, frozen

from .actions import Action, Row, Schedule, ScheduleError, Work
from .activation_memory import MemoryBudget, least
from .beam_search import Bound, searched
from .feasibility import Task
from .p2p import with_messages
from .partial_schedule import Move, Progress
from .registry import SCHEDULES
from .timeline import Times, simulate


@frozen
class Rule:
    """A rule for a rank's next action: the one that begins first, with these handicaps."""

    forward: float
    """How much later a backward may begin and still go before a forward; below 0, the other way
    around.
    """
    weight: float
    """How much later something else may begin and still go before a weight part."""
    ahead: float
    """How many microbatches a stage may be ahead of its backward, for each stage from it to the
    last.
    """

    def best(self, rank: int, progress: Progress) -> Move | None:
        """The rank's next action; none if it must wait for others."""
        moves = sorted(
            (move for move in progress.moves(rank) if self._allows(move, progress)), key=self._rank
        )
        return next(filter(progress.fits, moves), None)

    def _allows(self, move: Move, progress: Progress) -> bool:
        ahead = progress.filling.forwards[move.stage] - progress.filling.backwards[move.stage]
        return move.work is not Work.FORWARD or ahead < self.ahead * (
            progress.task.stages - move.stage
        )

    def _rank(self, move: Move) -> tuple[float, float, int]:
        handicap = (
            self.forward
            if move.work is Work.FORWARD
            else self.weight
            if move.work is Work.WEIGHT
            else 0.0
        )
        return move.start + handicap, handicap, -move.stage


def rules(task: Task) -> Iterator[Rule]:
    """Rules in the order in which they tend to be good: like 1F1B with weight parts in the gaps,
    like GPipe last.

    The first of a rank's stages would take all of little memory: less far ahead, it leaves some to
    the others.
    """
    times, stages = task.times, task.stages
    weight, forward = sum(times.weight) / stages, sum(times.forward) / stages
    ahead = dict.fromkeys((1, task.ranks / stages, 2, inf))
    for lag, patience in product((-forward, 1e-9 * forward, forward), (1e-9 * weight, weight, inf)):
        yield from (Rule(lag, patience, each) for each in ahead)


def followed(rule: Rule, task: Task) -> Progress:
    """The rows that a rule makes: of all ranks' next moves, always the one that begins first."""
    progress = Progress.begin(task)
    best = {rank: rule.best(rank, progress) for rank in range(task.ranks)}
    while able := [(move.start, rank, move) for rank, move in best.items() if move]:
        _, rank, move = min(able, key=lambda each: each[:2])
        if not progress.fits(move):  # others have taken it
            best[rank] = rule.best(rank, progress)
            continue
        progress.do(rank, move)
        for other in task.touched(move.stage, move.work):
            best[other] = rule.best(other, progress)
    return progress


RULED = 200_000  # cells that rules may write: a few seconds
SEARCHED = 6_000  # orders that the search may go on from


@frozen
class _Found:
    """A schedule, and how long it takes."""

    total: float
    schedule: Schedule
    task: Task

    @classmethod
    def of(cls, made: Progress) -> "_Found":
        """One that was made cell by cell."""
        return cls(max(made.free), made.schedule(), made.task)


def fastest(tasks: Sequence[Task], splits: bool = True) -> Schedule:
    """The fastest schedule found in which no rank holds more than it may; the best there is in
    small cases.

    The tasks differ in where stages lie.  It is no slower than any named schedule that has the
    `stage_to_rank` of one of them and fits its memory.  Where backward cannot be split, without
    `splits`, it is one of those.  `ScheduleError` if one microbatch alone is too much for a rank.
    """
    for task in tasks:
        demand_memory(task.stage_to_rank, task.budget)
    named = [it for task in tasks for it in _named(task) if splits or not it.schedule.splits]
    best = _first(named) or _one_by_one(tasks[0])
    if splits and best.total > min(Bound.of(task)(Progress.begin(task)) for task in tasks):
        best = _first([best, *(it for task in tasks for it in _ruled(task, len(tasks)))]) or best
        for task in tasks:
            best = _searched(task, best, len(tasks)) or best
    return _joined(best.schedule, best.task.times) if best.schedule.splits else best.schedule


def demand_memory(stage_to_rank: tuple[int, ...], budget: MemoryBudget) -> None:
    """Raises ScheduleError where one microbatch alone is too much for a rank."""
    for rank, most in enumerate(budget.most):
        if (needs := least(stage_to_rank, rank, budget.keeps)) > most:
            raise ScheduleError(
                f"rank {rank} holds {needs:g} for one microbatch before any backward, its"
                f" memory budget is {most:g}",
                "give it more memory, or fewer layers to its stages",
            )


def _named(task: Task) -> Iterator[_Found]:
    """Named schedules with these stage_to_rank that fit the memory."""
    kept = evolve(task.budget, keeps=evolve(task.budget.keeps, handed=0, cuts=()))
    for maker in SCHEDULES.values():
        try:
            schedule = maker(task.ranks, task.microbatches, len(task.stage_to_rank) // task.ranks)
        except ScheduleError:
            continue
        if schedule.stage_to_rank == task.stage_to_rank and kept.holds(schedule):
            yield _Found(simulate(schedule, task.times).total, schedule, task)


def _ruled(task: Task, tasks: int) -> Iterator[_Found]:
    """Schedules made by rules, fewer where there are several tasks."""
    count = max(1, RULED // task.cells // tasks)
    return (_Found.of(followed(rule, task)) for rule in islice(rules(task), count))


def _searched(task: Task, best: _Found, tasks: int) -> _Found | None:
    """Schedules found by search that are faster than the best so far."""
    width = SEARCHED // task.cells // tasks
    made = (
        searched(task, best.total, width, lambda it: _fits(it.schedule(), task)) if width else None
    )
    return _Found.of(made) if made else None


def _first(found: Iterable[_Found]) -> _Found | None:
    """The fastest that fits, of several one that does not split backward."""
    ordered = sorted(found, key=lambda it: (it.total, it.schedule.splits))
    return next((it for it in ordered if _fits(it.schedule, it.task)), None)


def _fits(schedule: Schedule, task: Task) -> bool:
    """Whether messages fit too, which depends on when they begin: nothing delays them for lack
    of memory.
    """
    return not task.budget.keeps.handed or task.budget.holds(with_messages(schedule, task.times))


def _one_by_one(task: Task) -> _Found:
    """Each microbatch when the one before is done: which always fits."""
    there, back = range(task.stages), reversed(range(task.stages))
    order = [
        *((stage, Work.FORWARD) for stage in there),
        *((stage, Work.BACKWARD) for stage in back),
    ]
    rows = (
        tuple(
            Action(s, work, m)
            for m in range(task.microbatches)
            for s, work in order
            if task.stage_to_rank[s] == rank
        )
        for rank in range(task.ranks)
    )
    schedule = Schedule(task.stage_to_rank, task.microbatches, tuple(rows))
    return _Found(simulate(schedule, task.times).total, schedule, task)


def _joined(schedule: Schedule, times: Times) -> Schedule:
    """The same with backward in one wherever nobody waits for its first part alone: nothing
    begins later.
    """
    timeline = simulate(schedule, times)
    backwards = (
        slot
        for row in timeline.slots
        for slot in row
        if slot.action.work in (Work.INPUT, Work.BACKWARD)
    )
    begins = {(slot.action.stage, slot.action.microbatch): slot.start for slot in backwards}

    def needed(action: Action) -> float:
        """When the stage before begins with what an action's stage makes for it; a message must
        arrive till then.
        """
        before = max(action.stage - 1, 0)
        late = (
            times.send
            if schedule.stage_to_rank[before] != schedule.stage_to_rank[action.stage]
            else 0
        )
        return begins[before, action.microbatch] - late if action.stage else inf

    rows: list[Row] = []
    for row in timeline.slots:
        cells: list[Action] = []
        for slot in row:
            action = slot.action
            first = Action(action.stage, Work.INPUT, action.microbatch)
            if action.work is Work.WEIGHT and cells[-1:] == [first] and slot.end <= needed(action):
                cells[-1] = Action(action.stage, Work.BACKWARD, action.microbatch)
            else:
                cells.append(action)
        rows.append(tuple(cells))
    return Schedule(schedule.stage_to_rank, schedule.microbatches, tuple(rows))
