"""Schedules that alternate forwards and backwards once the pipeline is full.

1F1B, interleaved 1F1B, ZB-H1, ZB-H2 and the interleaved zero bubble, which are one order with other numbers.
"""

from .actions import Row, ScheduleError, Work
from .steps import RankContext, interleave_passes, numbered


def one_forward_one_backward(seat: RankContext) -> Row:
    """1F1B, PipeDream-flush (arXiv 2006.09503): of p ranks, rank r holds p - r microbatches at most."""
    return _alternating(seat, round_size=seat.microbatches, hop=1, split=False)


def interleaved(seat: RankContext) -> Row:
    """Megatron-LM's interleaved 1F1B (arXiv 2104.04473, section 2.2.2): the bubble of 1F1B divided by the chunks.

    There microbatches are a multiple of the ranks.  Here, as in torch, rounds may be longer than there are ranks, so
    that 6 microbatches pass 4 ranks in one round of 6.
    """
    return _alternating(seat, round_size=_round_size(seat), hop=2, split=False)


def zero_bubble_h1(seat: RankContext) -> Row:
    """ZB-H1 (arXiv 2401.10241, section 2.1): a bubble of (p - 1)(F + I - W), with 1F1B's memory of p microbatches."""
    return _alternating(seat, round_size=seat.microbatches, hop=1, split=True)


def zero_bubble_h2(seat: RankContext) -> Row:
    """ZB-H2 (arXiv 2401.10241, section 2.2): a bubble of (p - 1)(F + I - 2W), with memory for 2p - 1 microbatches.

    Ranks begin and end one after the other; that its bubble is zero where F, I and W take equally long is said of the
    time between a rank's own first and last action.
    """
    return _alternating(seat, round_size=seat.microbatches, hop=2, split=True)


def interleaved_zero_bubble(seat: RankContext) -> Row:
    """ZB-H1's order over the chunks of interleaved 1F1B, as torch has it; with one chunk it is ZB-H1."""
    return _alternating(seat, round_size=_round_size(seat), hop=1, split=True)


def _alternating(seat: RankContext, round_size: int, hop: int, split: bool) -> Row:
    """Chunks alternate in rounds of `round_size` microbatches; each hop to the last rank adds `hop` forwards ahead.

    Where backward is split, W waits for as many more I as there were fewer forwards ahead of them than on the first
    rank, so that all ranks hold equally many microbatches.
    """
    order = [at // round_size % seat.chunks for at in range(seat.microbatches * seat.chunks)]
    back = [seat.chunks - 1 - chunk for chunk in order]
    forwards = [(chunk, Work.FORWARD) for chunk in order]
    inputs = [(chunk, Work.INPUT if split else Work.BACKWARD) for chunk in back]
    weights = [None] * (hop * seat.rank) + [(chunk, Work.WEIGHT) for chunk in back if split]
    ahead = (seat.chunks - 1) * round_size + hop * seat.after
    return numbered([*forwards[:ahead], *interleave_passes(forwards[ahead:], inputs, weights)], seat.stages)


def _round_size(seat: RankContext) -> int:
    """How many microbatches a chunk takes before the next chunk does: one for each rank, or evenly more."""
    rounds = max(1, seat.microbatches // seat.ranks)
    if seat.microbatches % rounds:
        below = seat.microbatches - seat.microbatches % seat.ranks
        raise ScheduleError(
            f"{seat.microbatches} microbatches cannot be divided into {rounds} rounds of at least {seat.ranks}: "
            f"{seat.microbatches} / {rounds} is not whole",
            f"take a multiple of the ranks, such as {below} or {below + seat.ranks} microbatches",
        )
    return seat.microbatches // rounds
