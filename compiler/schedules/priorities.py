"""Rows made by always doing what a rule prefers: many rules, one pass each.

Purpose: good schedules of any size.  Non-goals: the best of small ones (`beam`).
"""

from collections.abc import Iterator
from itertools import product
from math import inf

from attrs import frozen

from .actions import Work
from .partial_schedule import Move, Progress, Task


@frozen
class Rule:
    """What a rank does next: what begins first, with these handicaps."""

    forward: float
    """How much later a backward may begin and still go before a forward; below 0, the other way around."""
    weight: float
    """How much later something else may begin and still go before a weight part."""
    ahead: float
    """How many microbatches a stage may be ahead of its backward, for each stage from it to the last."""

    def best(self, rank: int, progress: Progress) -> Move | None:
        """What the rank does next; none if it must wait for others."""
        moves = sorted((move for move in progress.moves(rank) if self._allows(move, progress)), key=self._rank)
        return next(filter(progress.has_room, moves), None)

    def _allows(self, move: Move, progress: Progress) -> bool:
        ahead = progress.filling.forwards[move.stage] - progress.filling.backwards[move.stage]
        return move.work is not Work.FORWARD or ahead < self.ahead * (progress.task.stages - move.stage)

    def _rank(self, move: Move) -> tuple[float, float, int]:
        handicap = self.forward if move.work is Work.FORWARD else self.weight if move.work is Work.WEIGHT else 0.0
        return move.start + handicap, handicap, -move.stage


def rules(task: Task) -> Iterator[Rule]:
    """Rules in the order in which they tend to be good: like 1F1B with weight parts in the gaps, like GPipe last.

    Of little memory the first of a rank's stages would take all: less far ahead, it leaves some to the others.
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
        if not progress.has_room(move):  # others have taken it
            best[rank] = rule.best(rank, progress)
            continue
        progress.do(rank, move)
        for other in task.touched(move.stage, move.work):
            best[other] = rule.best(other, progress)
    return progress
