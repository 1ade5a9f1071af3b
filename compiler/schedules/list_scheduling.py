"""A schedule made for given times and memory, `schedule = auto(memory = …)`: by named schedules,
by rules, and by a search.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, product
from math import inf

from attrs import evolve, frozen

from .actions import Action, Row, Schedule, ScheduleError, Work
from .activation_memory import MemoryBudget, least
from .beam_search import Bound, search_orders
from .feasibility import Task
from .p2p import with_messages
from .partial_schedule import Move, Progress
from .registry import SCHEDULES
from .timeline import Times, simulate


@frozen
class Rule:
    """A rule for a rank's next action: the action that begins first, with these handicaps."""

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
        """The rank's next action; None if it must wait for others."""
        moves = [move for move in progress.moves(rank) if self._allows(move, progress)]
        moves.sort(key=self._rank)
        for move in moves:
            if progress.fits(move):
                return move
        return None

    def _allows(self, move: Move, progress: Progress) -> bool:
        """Whether a forward is not too far ahead of its stage's backward."""
        if move.work is not Work.FORWARD:
            return True
        ahead = progress.filling.forwards[move.stage] - progress.filling.backwards[move.stage]
        return ahead < self.ahead * (progress.task.stages - move.stage)

    def _rank(self, move: Move) -> tuple[float, float, int]:
        """The key that sorts moves, the best first."""
        handicap = 0.0
        if move.work is Work.FORWARD:
            handicap = self.forward
        elif move.work is Work.WEIGHT:
            handicap = self.weight
        return move.start + handicap, handicap, -move.stage


def rules(task: Task) -> Iterator[Rule]:
    """Rules, the ones that tend to be good first: first rules like 1F1B with weight parts in the
    gaps, last rules like GPipe.

    Where memory is scarce, the first of a rank's stages would take all of it: if it is less far
    ahead, it leaves some to the others.
    """
    times, stages = task.times, task.stages
    weight, forward = sum(times.weight) / stages, sum(times.forward) / stages
    forward_handicaps = (-forward, 1e-9 * forward, forward)
    weight_handicaps = (1e-9 * weight, weight, inf)
    limits = dict.fromkeys((1, task.ranks / stages, 2, inf))
    for forward_handicap, weight_handicap in product(forward_handicaps, weight_handicaps):
        for ahead in limits:
            yield Rule(forward_handicap, weight_handicap, ahead)


def follow_rule(rule: Rule, task: Task) -> Progress:
    """The rows that a rule makes: the first to begin of all ranks' next moves is always done."""
    progress = Progress.begin(task)
    best = {rank: rule.best(rank, progress) for rank in range(task.ranks)}
    while able := [(move.start, rank, move) for rank, move in best.items() if move]:
        _, rank, move = min(able, key=lambda start_rank_move: start_rank_move[:2])
        if not progress.fits(move):  # others have taken its memory
            best[rank] = rule.best(rank, progress)
            continue
        progress.do(rank, move)
        for other in task.ranks_affected_by(move.stage, move.work):
            best[other] = rule.best(other, progress)
    return progress


RULED = 200_000  # cells that rules may write: a few seconds
SEARCHED = 6_000  # orders that the search may go on from


@frozen
class _Candidate:
    """A schedule, and how long it takes."""

    total: float
    schedule: Schedule
    task: Task

    @classmethod
    def of(cls, progress: Progress) -> "_Candidate":
        """A schedule that was made cell by cell."""
        return cls(max(progress.free), progress.schedule(), progress.task)


def fastest(tasks: Sequence[Task], splits: bool = True) -> Schedule:
    """The fastest schedule that the search finds where no rank holds more than it may; the best
    there is in small cases.

    The tasks differ in the ranks of their stages.  The schedule is no slower than any named
    schedule that has the `stage_to_rank` of one of the tasks and fits its memory.  Without
    `splits`, where backward cannot be split, it is one of these named schedules.  Raises
    ScheduleError if one microbatch alone is too much for a rank.
    """
    for task in tasks:
        demand_memory(task.stage_to_rank, task.budget)
    candidates = [*chain.from_iterable(map(_candidates_with_names, tasks))]
    if not splits:
        candidates = [candidate for candidate in candidates if not candidate.schedule.splits]
    best = _first(candidates) or _one_by_one(tasks[0])
    if splits and best.total > min(Bound.from_task(task)(Progress.begin(task)) for task in tasks):
        ruled = [best]
        for task in tasks:
            ruled.extend(_candidates_by_rules(task, len(tasks)))
        best = _first(ruled) or best
        for task in tasks:
            best = _search(task, best, len(tasks)) or best
    if best.schedule.splits:
        return _join_backwards(best.schedule, best.task.times)
    return best.schedule


def demand_memory(stage_to_rank: tuple[int, ...], budget: MemoryBudget) -> None:
    """Raises ScheduleError where one microbatch alone is too much for a rank."""
    for rank, most in enumerate(budget.most):
        if (needs := least(stage_to_rank, rank, budget.keeps)) > most:
            raise ScheduleError(
                f"rank {rank} holds {needs:g} for one microbatch before any backward, its"
                f" memory budget is {most:g}",
                "give it more memory, or fewer layers to its stages",
            )


def _candidates_with_names(task: Task) -> Iterator[_Candidate]:
    """Named schedules with the task's stage_to_rank that fit the memory."""
    budget = evolve(task.budget, keeps=evolve(task.budget.keeps, handed=0, cuts=()))
    for maker in SCHEDULES.values():
        try:
            schedule = maker(task.ranks, task.microbatches, len(task.stage_to_rank) // task.ranks)
        except ScheduleError:
            continue
        if schedule.stage_to_rank == task.stage_to_rank and budget.holds(schedule):
            yield _Candidate(simulate(schedule, task.times).total, schedule, task)


def _candidates_by_rules(task: Task, tasks: int) -> Iterator[_Candidate]:
    """Schedules made by rules, fewer where there are several tasks."""
    count = max(1, RULED // task.cells // tasks)
    return (_Candidate.of(follow_rule(rule, task)) for rule in islice(rules(task), count))


def _search(task: Task, best: _Candidate, tasks: int) -> _Candidate | None:
    """A schedule that the search finds and that is faster than the best so far, if any."""
    width = SEARCHED // task.cells // tasks
    if not width:
        return None
    progress = search_orders(task, best.total, width, lambda order: _fits(order.schedule(), task))
    if progress is None:
        return None
    return _Candidate.of(progress)


def _first(candidates: Iterable[_Candidate]) -> _Candidate | None:
    """The fastest that fits; of several equally fast ones, one that does not split backward."""
    by_time = sorted(candidates, key=lambda candidate: (candidate.total, candidate.schedule.splits))
    for candidate in by_time:
        if _fits(candidate.schedule, candidate.task):
            return candidate
    return None


def _fits(schedule: Schedule, task: Task) -> bool:
    """Whether messages fit too; this depends on when they begin, since nothing delays them for
    lack of memory.
    """
    return not task.budget.keeps.handed or task.budget.holds(with_messages(schedule, task.times))


def _one_by_one(task: Task) -> _Candidate:
    """Each microbatch begins when the one before is done; this schedule always fits."""
    order = [(stage, Work.FORWARD) for stage in range(task.stages)]
    order += [(stage, Work.BACKWARD) for stage in reversed(range(task.stages))]
    rows: list[list[Action]] = [[] for _ in range(task.ranks)]
    for microbatch in range(task.microbatches):
        for stage, work in order:
            rows[task.stage_to_rank[stage]].append(Action(stage, work, microbatch))
    schedule = Schedule(task.stage_to_rank, task.microbatches, tuple(map(tuple, rows)))
    return _Candidate(simulate(schedule, task.times).total, schedule, task)


def _join_backwards(schedule: Schedule, times: Times) -> Schedule:
    """The same schedule with backward in one action wherever nobody waits for its first part
    alone: nothing begins later.
    """
    timeline = simulate(schedule, times)
    begins: dict[tuple[int, int], float] = {}
    for slot in chain.from_iterable(timeline.slots):
        if slot.action.work in (Work.INPUT, Work.BACKWARD):
            begins[slot.action.stage, slot.action.microbatch] = slot.start

    def deadline(action: Action) -> float:
        """When the result of an action's stage must leave, so that the backward of the stage
        before begins in time; inf where nothing waits for it.
        """
        if not action.stage:
            return inf
        before = action.stage - 1
        delay = 0.0
        if schedule.stage_to_rank[before] != schedule.stage_to_rank[action.stage]:
            delay = times.send
        return begins[before, action.microbatch] - delay

    rows: list[Row] = []
    for row in timeline.slots:
        cells: list[Action] = []
        for slot in row:
            action = slot.action
            first = Action(action.stage, Work.INPUT, action.microbatch)
            follows_first = action.work is Work.WEIGHT and cells[-1:] == [first]
            if follows_first and slot.end <= deadline(action):
                cells[-1] = Action(action.stage, Work.BACKWARD, action.microbatch)
            else:
                cells.append(action)
        rows.append(tuple(cells))
    return Schedule(schedule.stage_to_rank, schedule.microbatches, tuple(rows))
