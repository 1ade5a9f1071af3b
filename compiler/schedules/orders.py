"""The rows of named schedules."""

from collections.abc import Iterable
from itertools import chain, zip_longest

from attrs import frozen

from .actions import Action, Row, ScheduleError, Work


@frozen
class RankContext:
    """A rank of a pipeline for which a row is written, and its stages."""

    rank: int
    ranks: int
    microbatches: int
    stages: tuple[int, ...]
    """The rank's stages, in the model's order; their places here are its chunks."""

    @property
    def chunks(self) -> int:
        """The number of the rank's stages."""
        return len(self.stages)

    @property
    def after(self) -> int:
        """The number of ranks after it."""
        return self.ranks - 1 - self.rank


Step = tuple[int, Work]
"""The next action of one chunk of a rank."""
Steps = tuple[Step, ...]


def number_steps(steps: Iterable[Step], stages: tuple[int, ...]) -> Row:
    """The row of steps whose chunks take microbatches in order: each of F, I and W takes the next
    one.

    B is I and W, so it takes the next microbatch of both.
    """
    counts_by_work = {work: [0] * len(stages) for work in (Work.FORWARD, Work.INPUT, Work.WEIGHT)}
    counts_by_work[Work.BACKWARD] = counts_by_work[Work.INPUT]
    row: list[Action] = []
    for chunk, work in steps:
        counts = counts_by_work[work]
        row.append(Action(stages[chunk], work, counts[chunk]))
        counts[chunk] += 1
        if work is Work.BACKWARD:
            counts_by_work[Work.WEIGHT][chunk] += 1
    return tuple(row)


def interleave_passes(*columns: Iterable[Step | None]) -> Steps:
    """One step of each column in turn, `None` left out, until the longest column ends."""
    steps = chain.from_iterable(zip_longest(*columns))
    return tuple(step for step in steps if step is not None)


# ---- all forwards, then all backwards


def gpipe(seat: RankContext) -> Row:
    """GPipe (arXiv 1811.06965): memory for all microbatches, the bubble of 1F1B.

    Backward takes microbatches in the order of forward, as in torch; the paper draws the opposite
    order, which takes the same time.
    """
    return _passes(seat, range(seat.microbatches))


def breadth_first(seat: RankContext) -> Row:
    """Breadth-first pipelining (arXiv 2211.05953, section 4): each chunk has all microbatches
    before the next has any.

    Backward begins with the last microbatch, as in torch.
    """
    return _passes(seat, reversed(range(seat.microbatches)))


def _passes(seat: RankContext, backward: Iterable[int]) -> Row:
    """All forwards, stage by stage, then all backwards, with microbatches in the order of
    `backward`.
    """
    row: list[Action] = []
    for stage in seat.stages:
        for microbatch in range(seat.microbatches):
            row.append(Action(stage, Work.FORWARD, microbatch))
    backward_order = tuple(backward)
    for stage in reversed(seat.stages):
        for microbatch in backward_order:
            row.append(Action(stage, Work.BACKWARD, microbatch))
    return tuple(row)


# ---- forwards and backwards that alternate once the pipeline is full: one order with other numbers


def one_forward_one_backward(seat: RankContext) -> Row:
    """1F1B, PipeDream-flush (arXiv 2006.09503): of p ranks, rank r holds p - r microbatches at
    most.
    """
    return _alternating(seat, round_size=seat.microbatches, hop=1, split=False)


def one_forward_one_backward_of_chunks(seat: RankContext) -> Row:
    """Megatron-LM's interleaved 1F1B (arXiv 2104.04473, section 2.2.2): the bubble of 1F1B divided
    by the chunks.

    There microbatches are a multiple of the ranks.  Here, as in torch, rounds may be longer than
    there are ranks, so that 6 microbatches pass 4 ranks in one round of 6.
    """
    return _alternating(seat, round_size=_round_size(seat), hop=2, split=False)


def zero_bubble_h1(seat: RankContext) -> Row:
    """ZB-H1 (arXiv 2401.10241, section 2.1): a bubble of (p - 1)(F + I - W), with 1F1B's memory
    of p microbatches.
    """
    return _alternating(seat, round_size=seat.microbatches, hop=1, split=True)


def zero_bubble_h2(seat: RankContext) -> Row:
    """ZB-H2 (arXiv 2401.10241, section 2.2): a bubble of (p - 1)(F + I - 2W), with memory for 2p -
    1 microbatches.

    Ranks begin and end one after the other.  The paper says that its bubble is zero where F, I and
    W take equally long; it means the time between a rank's own first and last action.
    """
    return _alternating(seat, round_size=seat.microbatches, hop=2, split=True)


def zero_bubble_of_chunks(seat: RankContext) -> Row:
    """ZB-H1's order over the chunks of interleaved 1F1B, as torch has it; with one chunk it is
    ZB-H1.
    """
    return _alternating(seat, round_size=_round_size(seat), hop=1, split=True)


def _alternating(seat: RankContext, round_size: int, hop: int, split: bool) -> Row:
    """Chunks alternate in rounds of `round_size` microbatches; each hop to the last rank adds `hop`
    forwards ahead.

    Where backward is split, W waits for as many more I as there were fewer forwards ahead of them
    than on the first rank, so that all ranks hold equally many microbatches.
    """
    count = seat.microbatches * seat.chunks
    order = [number // round_size % seat.chunks for number in range(count)]
    back = [seat.chunks - 1 - chunk for chunk in order]
    forwards = [(chunk, Work.FORWARD) for chunk in order]
    backward_work = Work.INPUT if split else Work.BACKWARD
    backwards = [(chunk, backward_work) for chunk in back]
    weights: list[Step | None] = []
    if split:
        weights = [None] * (hop * seat.rank)
        weights += [(chunk, Work.WEIGHT) for chunk in back]
    ahead = (seat.chunks - 1) * round_size + hop * seat.after
    steady = interleave_passes(forwards[ahead:], backwards, weights)
    return number_steps([*forwards[:ahead], *steady], seat.stages)


def _round_size(seat: RankContext) -> int:
    """How many microbatches a chunk takes before the next chunk does: one for each rank, or
    evenly more.
    """
    rounds = max(1, seat.microbatches // seat.ranks)
    if seat.microbatches % rounds:
        below = seat.microbatches - seat.microbatches % seat.ranks
        raise ScheduleError(
            f"{seat.microbatches} microbatches cannot be divided into {rounds} rounds of at"
            f" least {seat.ranks}: "
            f"{seat.microbatches} / {rounds} is not whole",
            f"take a multiple of the ranks, such as {below} or {below + seat.ranks} microbatches",
        )
    return seat.microbatches // rounds


# ---- V-shaped: the stages go down the ranks and back up, and each rank has one of the first half
# and one of the second

# Steps in letters: `F0` is a forward of the first chunk, `I1` the input part of a backward of the
# second.
F0: Steps = ((0, Work.FORWARD),)
F1: Steps = ((1, Work.FORWARD),)
B0: Steps = ((0, Work.BACKWARD),)
B1: Steps = ((1, Work.BACKWARD),)
I0: Steps = ((0, Work.INPUT),)
I1: Steps = ((1, Work.INPUT),)
W0: Steps = ((0, Work.WEIGHT),)
W1: Steps = ((1, Work.WEIGHT),)


def zero_bubble_v(seat: RankContext) -> Row:
    """ZB-V (arXiv 2405.15362; 2401.10241, section 6): no bubble where F, I and W take equally long,
    1F1B's memory.

    The order is for 2p - 1 microbatches or more; with fewer, the schedule of 2p - 1 leaves out the
    missing ones.
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
    row = number_steps(steps, seat.stages)
    return tuple(action for action in row if action.microbatch < seat.microbatches)


def dualpipe_v(seat: RankContext) -> Row:
    """DualPipeV, DeepSeek's DualPipe (arXiv 2412.19437, section 3.2.1) cut in half:
    github.com/deepseek-ai/DualPipe.

    Its pairs, a forward and a backward to be overlapped, come here one after the other, so that a
    rank need not wait for both.  Where F, I and W take 1, that makes a bubble of p - 1; DeepSeek's
    formula gives pairs 2(p - 1).
    """
    ranks, before, after = seat.ranks, seat.rank, seat.after
    if seat.microbatches < 2 * ranks:
        raise ScheduleError(
            f"{seat.microbatches} microbatches are fewer than the 2 × {ranks} stages",
            f"take at least {2 * ranks} microbatches, or `zbv`",
        )
    whole = before + 1  # this many backwards after the last forward are in one; later ones split
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
    return number_steps(steps, seat.stages)
