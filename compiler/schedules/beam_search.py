"""The best of all orders, as far as it can be looked for: exactly in small cases.

A search by levels, each one cell longer than the last, that keeps the most promising of each.
Where it never has to drop one, no order is better than what it finds.

It branches as Giffler and Thompson (1960) do: of all that could be next something ends first, on
some rank, and in some best order what that rank does next begins before that end.  An action that
takes memory may also be left for later, since others may need it more; then the same holds of the
rest.
"""

from collections.abc import Callable, Iterable, Iterator

from attrs import frozen

from .feasibility import Task
from .partial_schedule import Move, Progress


def searched(
    task: Task, below: float, width: int, fits: Callable[[Progress], bool]
) -> Progress | None:
    """The best order found that `fits` and takes less than `below`, with `width` orders on each
    level; else none.
    """
    bound = Bound.of(task)
    best: Progress | None = None
    level = [Progress.begin(task)]
    while level:
        children = [child for progress in level for child in _next(progress)]
        for child in children:
            if child.is_done and max(child.free) < below and fits(child):
                best, below = child, max(child.free)
        costs = sorted(
            (bound(child), sum(child.free), at)
            for at, child in enumerate(children)
            if not child.is_done
        )
        level = _undominated((children[at] for cost, _, at in costs if cost < below), width)
    return best


def _next(progress: Progress) -> Iterator[Progress]:
    """Orders with one cell more."""
    moves = [
        (move.end, rank, move)
        for rank in range(len(progress.free))
        for move in progress.moves(rank)
    ]
    moves = [each for each in moves if progress.fits(each[2])]
    moves.sort(key=lambda each: each[:2])
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


def _undominated(orders: Iterable[Progress], width: int) -> list[Progress]:
    """The first orders, without those that have done no more than another and are nowhere
    earlier.
    """
    kept: dict[object, list[tuple[float, ...]]] = {}
    found: list[Progress] = []
    for progress in orders:
        done, when = progress.done(), progress.when()
        others = kept.setdefault(done, [])
        if not any(all(a <= b for a, b in zip(other, when, strict=True)) for other in others):
            others.append(when)
            found.append(progress)
            if len(found) == width:
                break
    return found


@frozen
class Bound:
    """The least time that orders can take: the rest of each stage's work, and then what must
    follow the last of it.
    """

    task: Task
    begins: tuple[float, ...]
    """When each rank can begin at the earliest."""
    after_forward: tuple[float, ...]
    """The time after the forward of the last microbatch on each stage."""
    after_backward: tuple[float, ...]
    """The same for the input part of its backward."""

    @classmethod
    def of(cls, task: Task) -> "Bound":
        """The parts that are the same for all orders."""
        times, last = task.times, task.stages - 1
        there = [0.0]
        for stage in range(1, task.stages):
            there.append(there[-1] + times.forward[stage - 1] + task.delay(stage - 1, stage))
        begins = (min((there[stage] for stage in own), default=0.0) for own in task.stages_of)
        back = [times.weight[0]]
        for stage in range(1, task.stages):
            onward = task.delay(stage, stage - 1) + times.input[stage - 1] + back[-1]
            back.append(max(times.weight[stage], onward))
        forth = [times.input[last] + back[last]]
        for stage in reversed(range(last)):
            forth.append(task.delay(stage, stage + 1) + times.forward[stage + 1] + forth[-1])
        return cls(task, tuple(begins), tuple(reversed(forth)), tuple(back))

    def __call__(self, progress: Progress) -> float:
        """For one order."""
        least = 0.0
        times, count, filling = self.task.times, self.task.microbatches, progress.filling
        for rank, stages in enumerate(self.task.stages_of):
            rest = free = max(progress.free[rank], self.begins[rank])
            for stage in stages:
                forwards, backwards = (
                    count - filling.forwards[stage],
                    count - filling.backwards[stage],
                )
                forward, backward = forwards * times.forward[stage], backwards * times.input[stage]
                rest += (
                    forward
                    + backward
                    + (backwards + len(progress.owed[stage])) * times.weight[stage]
                )
                if forwards:
                    least = max(least, free + forward + self.after_forward[stage])
                if backwards:
                    least = max(least, free + backward + self.after_backward[stage])
            least = max(least, rest)
        return least
