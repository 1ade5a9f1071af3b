"""Schedules whose stages go down the ranks and back up: each rank has one of the first half and one of the second.

ZB-V and DualPipeV, phase by phase in letters: `F0` is a forward of the first chunk, `I1` the input part of
a backward of the second.
"""

from .actions import Row, ScheduleError, Work
from .steps import RankContext, Steps, interleave_passes, numbered

F0: Steps = ((0, Work.FORWARD),)
F1: Steps = ((1, Work.FORWARD),)
B0: Steps = ((0, Work.BACKWARD),)
B1: Steps = ((1, Work.BACKWARD),)
I0: Steps = ((0, Work.INPUT),)
I1: Steps = ((1, Work.INPUT),)
W0: Steps = ((0, Work.WEIGHT),)
W1: Steps = ((1, Work.WEIGHT),)


def zero_bubble_v(seat: RankContext) -> Row:
    """ZB-V (arXiv 2405.15362; 2401.10241, section 6): no bubble where F, I and W take equally long, 1F1B's memory.

    Written for 2p - 1 microbatches or more; with fewer, the schedule of 2p - 1 leaves out those that are not there.
    """
    ranks, before, after = seat.ranks, seat.rank, seat.after
    microbatches = max(seat.microbatches, 2 * ranks - 1)
    steps = (
        F0 * (2 * after + 1)
        + (F1 + F0) * before
        + (F1 + I1 + W1) * (after + 1)
        + (F0 + I0 + W0 + F1 + I1 + W1) * (microbatches - ranks - after)
        + (I0 + W0 + F1 + I1 + W1) * after
        + (I0 + I1) * before
        + (I0 + W0) * (after + 1)
        + W1 * before
        + W0 * before
    )
    return tuple(action for action in numbered(steps, seat.stages) if action.microbatch < seat.microbatches)


def dualpipe_v(seat: RankContext) -> Row:
    """DualPipeV, DeepSeek's DualPipe (arXiv 2412.19437, section 3.2.1) cut in half: github.com/deepseek-ai/DualPipe.

    Its pairs, a forward and a backward to be overlapped, come here one after the other, so that a rank need not wait
    for both.  Where F, I and W take 1, that makes a bubble of p - 1; DeepSeek's formula gives pairs 2(p - 1).
    """
    ranks, before, after = seat.ranks, seat.rank, seat.after
    if seat.microbatches < 2 * ranks:
        raise ScheduleError(
            f"{seat.microbatches} microbatches are fewer than the 2 × {ranks} stages",
            f"take at least {2 * ranks} microbatches, or `zbv`",
        )
    whole = before + 1  # of the backwards after the last forward; those after them are split
    steps = (
        F0 * (2 * after)
        + (F0 + F1) * (before + 1)
        + (I1 + W1 + F1) * after
        + (F0 + B1 + F1 + B0) * (seat.microbatches - ranks - after)
        + (B1 + F1 + B0) * after
        + ((B1 + B0) * (before + 1))[:whole]
        + ((I1 + I0) * (before + 1))[whole:]
        + interleave_passes(((W1 + W0) * (before + 1))[whole:] + W0 * after, I0 * after)
    )
    return numbered(steps, seat.stages)
