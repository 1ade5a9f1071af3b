"""Schedules that do all forwards, then all backwards."""

from collections.abc import Iterable

from .actions import Action, Row, Work
from .steps import RankContext


def gpipe(seat: RankContext) -> Row:
    """GPipe (arXiv 1811.06965): memory for all microbatches, the bubble of 1F1B.

    Backward takes microbatches in the order of forward, as in torch; the paper draws the opposite order, which takes
    the same time.
    """
    return _passes(seat, range(seat.microbatches))


def breadth_first(seat: RankContext) -> Row:
    """Breadth-first pipelining (arXiv 2211.05953, section 4): each chunk has all microbatches before the next has any.

    Backward begins with the last microbatch, as in torch.
    """
    return _passes(seat, reversed(range(seat.microbatches)))


def _passes(seat: RankContext, backward: Iterable[int]) -> Row:
    back = tuple(backward)
    return (
        *(Action(stage, Work.FORWARD, each) for stage in seat.stages for each in range(seat.microbatches)),
        *(Action(stage, Work.BACKWARD, each) for stage in reversed(seat.stages) for each in back),
    )
