"""A search for the best of all orders; in small cases it finds the best one exactly.

The search goes by levels: orders of each level are one cell longer than orders of the last, and it
goes on from the most promising orders of each level.  Where it never has to drop an order, no order
is better than the one that it finds.

It branches as Giffler and Thompson (1960) do: of all possible next actions one ends first, on some
rank; in some best order, the next action of this rank begins before that end.  An action that takes
memory may also be left for later, since others may need the memory more; then the same holds of the
remaining actions.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from attrs import frozen

from .feasibility import Task
from .partial_schedule import Move, Progress


def search_orders(
    task: Task, below: float, width: int, fits: Callable[[Progress], bool]
) -> Progress | None:
    """The best order that the search finds, `fits` and takes less than `below`; None if it finds
    none.

    The search goes on from at most `width` orders of each level.
    """
    bound = Bound.from_task(task)
    best: Progress | None = None
    level = [Progress.begin(task)]
    while level:
        children = [*chain.from_iterable(map(_next, level))]
        for child in children:
            if child.is_done and max(child.free) < below and fits(child):
                best, below = child, max(child.free)
        costs: list[tuple[float, float, int]] = []
        for number, child in enumerate(children):
            if not child.is_done:
                costs.append((bound(child), sum(child.free), number))
        costs.sort()
        promising = (children[number] for cost, _, number in costs if cost < below)
        level = _drop_dominated(promising, width)
    return best


def _next(progress: Progress) -> Iterator[Progress]:
    """Orders with one cell more."""
    moves: list[tuple[float, int, Move]] = []
    for rank in range(len(progress.free)):
        for move in progress.moves(rank):
            if progress.fits(move):
                moves.append((move.end, rank, move))
    moves.sort(key=lambda end_rank_move: end_rank_move[:2])
    tried: set[Move] = set()
    for end, rank, first in moves:
        for _, other, move in moves:
            if other == rank and (move.start < end or move is first) and move not in tried:
                tried.add(move)
                child = progress.copy()
                child.do(rank, move)
                yield child
        if not progress.filling.takes(first.stage, first.work):
            break


def _drop_dominated(orders: Iterable[Progress], width: int) -> list[Progress]:
    """The first `width` orders, except each order that has done no more than another one before
    it and is nowhere earlier.
    """
    times_by_progress: dict[object, list[tuple[float, ...]]] = {}
    undominated: list[Progress] = []
    for progress in orders:
        when = progress.when()
        others = times_by_progress.setdefault(progress.done(), [])
        if not any(_is_nowhere_later(other, when) for other in others):
            others.append(when)
            undominated.append(progress)
            if len(undominated) == width:
                break
    return undominated


def _is_nowhere_later(times: tuple[float, ...], others: tuple[float, ...]) -> bool:
    for time, other in zip(times, others, strict=True):  # noqa: SIM110 - faster than all()
        if time > other:
            return False
    return True


@frozen
class Bound:
    """The least time that orders can take: the remaining work of each stage, and then the work
    that must follow it.
    """

    task: Task
    begins: tuple[float, ...]
    """When each rank can begin at the earliest."""
    after_forward: tuple[float, ...]
    """The time after the forward of the last microbatch on each stage."""
    after_backward: tuple[float, ...]
    """The same for the input part of its backward."""

    @classmethod
    def from_task(cls, task: Task) -> "Bound":
        """The parts that are the same for all orders."""
        times, last = task.times, task.stages - 1
        arrivals = [0.0]  # when the first microbatch can be at each stage
        for stage in range(1, task.stages):
            delay = task.delay(stage - 1, stage)
            arrivals.append(arrivals[-1] + times.forward[stage - 1] + delay)
        begins: list[float] = []
        for stages in task.stages_of:
            begins.append(min([arrivals[stage] for stage in stages], default=0.0))
        back = [times.weight[0]]
        for stage in range(1, task.stages):
            onward = task.delay(stage, stage - 1) + times.input[stage - 1] + back[-1]
            back.append(max(times.weight[stage], onward))
        forth = [times.input[last] + back[last]]
        for stage in reversed(range(last)):
            forth.append(task.delay(stage, stage + 1) + times.forward[stage + 1] + forth[-1])
        return cls(task, tuple(begins), tuple(reversed(forth)), tuple(back))

    def __call__(self, progress: Progress) -> float:
        """The least time of one order."""
        least = 0.0
        times, count, filling = self.task.times, self.task.microbatches, progress.filling
        for rank, stages in enumerate(self.task.stages_of):
            end = free = max(progress.free[rank], self.begins[rank])
            for stage in stages:
                forwards = count - filling.forwards[stage]
                backwards = count - filling.backwards[stage]
                weights = backwards + len(progress.owed[stage])
                forward, backward = forwards * times.forward[stage], backwards * times.input[stage]
                end += forward + backward + weights * times.weight[stage]
                if forwards:
                    least = max(least, free + forward + self.after_forward[stage])
                if backwards:
                    least = max(least, free + backward + self.after_backward[stage])
            least = max(least, end)
        return least
