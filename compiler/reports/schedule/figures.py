"""A schedule in figures: how long each rank computes and waits, what it holds, and the bubble."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from ...analysis.memory import Account
from ...config.units import amount
from ...schedules.activation_memory import high_water
from ..summary import table
from .formulas import expected
from .picture import Picture, number, share


def figures(picture: Picture, accounts: Sequence[Account] = ()) -> str:
    """A table with a line for each rank, and the bubble beside that of the formula, where one is known.

    `accounts` are those of the ranks, where the schedule is a plan's.
    """
    heads = (*_HEAD, *(_BYTES if accounts else ()))
    rows = [row + _bytes(it) for row, it in zip_longest(_rows(picture), accounts)]
    return "\n".join((*table([heads, *rows]), "", *_bubble(picture, accounts)))


_HEAD = ("rank", "stages", "busy", "idle", "bubble", "microbatches in flight")
_BYTES = ("activations", "with state")


def _rows(picture: Picture) -> Iterator[tuple[str, ...]]:
    timeline = picture.timeline
    for rank, held in enumerate(high_water(picture.schedule)):
        busy, idle = timeline.busy(rank), timeline.idle(rank)
        stages = " ".join(map(str, picture.schedule.stages_of(rank)))
        yield str(rank), stages, number(busy), number(idle), share(idle / timeline.total), number(held)


def _bytes(account: Account | None) -> tuple[str, ...]:
    return (amount(account.peak.bytes), amount(account.total)) if account else ()


def _bubble(picture: Picture, accounts: Sequence[Account]) -> Iterator[str]:
    timeline, schedule = picture.timeline, picture.schedule
    if picture.depth > 1:
        yield "in flight: the most at once, in any stage, from forward to the end of backward"
    if accounts:
        yield "activations: of microbatches, at peak memory; with state: the total of the rank then"
    if not picture.times.are_alike:
        yield "f, b, w: cost of a stage, lowest to highest, relative to the most expensive forward; --unit: all equal"
    yield f"bubble: {share(timeline.bubble)} of all ranks' time"
    formula = expected(picture.kind, schedule.ranks, schedule.microbatches, picture.times)
    if not formula:
        return
    busy = sum(map(timeline.busy, range(schedule.ranks))) / schedule.ranks
    part = share(formula.idle / (busy + formula.idle))
    free = ", if messages took no time" if picture.times.send else ""
    yield f"formula{free}: {formula.text} = {number(formula.idle)} on each rank, {part}"
