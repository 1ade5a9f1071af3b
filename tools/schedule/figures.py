"""A schedule in figures: busy and idle time of each rank, its memory, and the bubble beside the
paper's formula.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

from attrs import frozen

from ...compiler.analysis.memory import Account
from ...compiler.config.units import amount
from ...compiler.reports.summary import table
from ...compiler.schedules.activation_memory import high_water
from ...compiler.schedules.timeline import Times
from .picture import Picture, number, share


@frozen
class Formula:
    """The idle time of each rank where messages take none, for p ranks, and where that is true."""

    text: str
    idle: Callable[[float, float, float], float]
    """A function of f, b and w, for p = 2."""
    least: Callable[[int], int]
    """The least number of microbatches that it is true for, given p ranks."""
    holds: Callable[[float, float, float], bool] = lambda f, b, w: True


def _full(least: Callable[[int], int]) -> Formula:
    return Formula("(p - 1)(f + b + w)", lambda f, b, w: f + b + w, least)


def _weights_fill(least: Callable[[int], int]) -> Formula:
    return Formula(
        "(p - 1)(f + b - w)", lambda f, b, w: f + b - w, least, lambda f, b, w: w <= min(f, b)
    )


def _ramps(least: Callable[[int], int]) -> Formula:
    """Only before a rank's first action and after its last."""
    return Formula("(p - 1)f", lambda f, b, w: f, least, lambda f, b, w: f == b == w)


FORMULAS = {
    "gpipe": _full(lambda p: 1),  # arXiv 1811.06965
    "1f1b": _full(lambda p: 1),  # arXiv 2006.09503
    # arXiv 2104.04473, section 2.2, in times of its smaller stages
    "interleaved_1f1b": _full(lambda p: p),
    "breadth_first": _full(lambda p: p),  # arXiv 2211.05953
    "zb_h1": _weights_fill(lambda p: p),  # arXiv 2401.10241, table 1
    "interleaved_zero_bubble": _weights_fill(lambda p: p),
    "zb_h2": _ramps(lambda p: 2 * p - 1),  # arXiv 2401.10241, table 1, and what it leaves out
    "zbv": _ramps(lambda p: 2 * p - 1),  # arXiv 2405.15362
    "dualpipev": _ramps(lambda p: 2 * p),
}
"""By schedule, for stages that all take equally long."""


@frozen
class Expected:
    """The result of a formula for one schedule."""

    text: str
    idle: float
    """The idle time of each rank."""


def find_formula(kind: str, ranks: int, microbatches: int, times: Times) -> Expected | None:
    """The idle time of each rank of the schedule `kind`; none where no formula is known to be
    true.
    """
    formula = FORMULAS.get(kind)
    if formula is None or microbatches < formula.least(ranks) or not times.are_uniform:
        return None
    f, b, w = times.forward[0], times.input[0], times.weight[0]
    if not formula.holds(f, b, w):
        return None
    return Expected(formula.text, (ranks - 1) * formula.idle(f, b, w))


def figures(picture: Picture, accounts: Sequence[Account] = ()) -> str:
    """A table with a line for each rank, and the bubble beside the formula's, where one is known.

    `accounts` are the memory of the ranks, where the schedule is a plan's.
    """
    return "\n".join((*table([*ranks_table(picture, accounts)]), "", *_bubble(picture, accounts)))


_HEAD = ("rank", "stages", "busy", "idle", "bubble", "microbatches in flight")
_BYTES = ("activations", "with state")


def ranks_table(
    picture: Picture, accounts: Sequence[Account] = (), write: Callable[[float], str] = number
) -> Iterator[tuple[str, ...]]:
    """The head of the table and its rows; `write` turns a time into words."""
    yield (*_HEAD, *(_BYTES if accounts else ()))
    bytes = [(amount(account.peak.bytes), amount(account.needs)) for account in accounts]
    for row, more in zip_longest(_rows(picture, write), bytes, fillvalue=()):
        yield row + more


def _rows(picture: Picture, write: Callable[[float], str]) -> Iterator[tuple[str, ...]]:
    timeline = picture.timeline
    for rank, in_flight in enumerate(high_water(picture.schedule)):
        busy, idle = timeline.busy(rank), timeline.idle(rank)
        stages = " ".join(map(str, picture.schedule.stages_of(rank)))
        bubble = share(idle / timeline.total)
        yield str(rank), stages, write(busy), write(idle), bubble, number(in_flight)


def _bubble(picture: Picture, accounts: Sequence[Account]) -> Iterator[str]:
    timeline, schedule = picture.timeline, picture.schedule
    if picture.depth > 1:
        yield "in flight: the most at once, in any stage, from forward to the end of backward"
    if accounts:
        yield "activations: of microbatches, at peak memory; with state: the total of the rank then"
    if not picture.times.are_uniform:
        yield (
            "times: of a stage, lowest to highest, relative to the most expensive forward;"
            " --unit: all equal"
        )
    yield f"bubble: {share(timeline.bubble)} of all ranks' time"
    formula = find_formula(picture.kind, schedule.ranks, schedule.microbatches, picture.times)
    if not formula:
        return
    busy = sum(map(timeline.busy, range(schedule.ranks))) / schedule.ranks
    part = share(formula.idle / (busy + formula.idle))
    free = ", if messages took no time" if picture.times.send else ""
    yield f"formula{free}: {formula.text} = {number(formula.idle)} on each rank, {part}"
