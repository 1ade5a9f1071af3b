"""Rows from the steps of a rank's chunks strung together; the microbatch of each follows from its place."""

from collections.abc import Iterable
from itertools import zip_longest

from attrs import frozen

from .actions import Action, Row, Work


@frozen
class RankContext:
    """A rank of a pipeline for which a row is written, and its stages."""

    rank: int
    ranks: int
    microbatches: int
    stages: tuple[int, ...]
    """The stages it has, in the model's order; their places here are its chunks."""

    @property
    def chunks(self) -> int:
        """The number of stages it has."""
        return len(self.stages)

    @property
    def after(self) -> int:
        """The number of ranks after it."""
        return self.ranks - 1 - self.rank


Step = tuple[int, Work]
"""The next action of one chunk of a rank."""
Steps = tuple[Step, ...]


def numbered(steps: Iterable[Step], stages: tuple[int, ...]) -> Row:
    """The row of steps whose chunks take microbatches in order: the next one for each of F, I and W.

    B is I and W, so it has the next microbatch of both.
    """
    done = {work: [0] * len(stages) for work in (Work.FORWARD, Work.INPUT, Work.WEIGHT)}
    done[Work.BACKWARD] = done[Work.INPUT]
    row: list[Action] = []
    for chunk, work in steps:
        counts = done[work]
        row.append(Action(stages[chunk], work, counts[chunk]))
        counts[chunk] += 1
        if work is Work.BACKWARD:
            done[Work.WEIGHT][chunk] += 1
    return tuple(row)


def interleave_passes(*columns: Iterable[Step | None]) -> Steps:
    """One of each column in order, `None` left out, until the longest ends."""
    return tuple(step for row in zip_longest(*columns) for step in row if step is not None)
