"""How long each rank of a named schedule waits, by its paper's formula.

Purpose: what the simulated bubble is compared to.  Non-goals: schedules made for given times, for which there is none.
"""

from collections.abc import Callable

from attrs import frozen

from ...schedules.timeline import Times


@frozen
class Formula:
    """The idle time of each rank where messages take none, for p ranks, and where that is true."""

    text: str
    idle: Callable[[float, float, float], float]
    """Of f, b and w, for p = 2."""
    least: Callable[[int], int]
    """The number of microbatches from which on it is true, for p ranks."""
    holds: Callable[[float, float, float], bool] = lambda f, b, w: True


def _full(least: Callable[[int], int]) -> Formula:
    return Formula("(p - 1)(f + b + w)", lambda f, b, w: f + b + w, least)


def _weights_fill(least: Callable[[int], int]) -> Formula:
    return Formula("(p - 1)(f + b - w)", lambda f, b, w: f + b - w, least, lambda f, b, w: w <= min(f, b))


def _ramps(least: Callable[[int], int]) -> Formula:
    """Only before a rank's first action and behind its last."""
    return Formula("(p - 1)f", lambda f, b, w: f, least, lambda f, b, w: f == b == w)


FORMULAS = {
    "gpipe": _full(lambda p: 1),  # arXiv 1811.06965
    "1f1b": _full(lambda p: 1),  # arXiv 2006.09503
    "interleaved_1f1b": _full(lambda p: p),  # arXiv 2104.04473, section 2.2, in times of its smaller stages
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
    """What a formula says of one schedule."""

    text: str
    idle: float
    """Of each rank."""


def expected(kind: str, ranks: int, microbatches: int, times: Times) -> Expected | None:
    """The idle time of each rank of the schedule `kind`; none where no formula is known to be true."""
    formula = FORMULAS.get(kind)
    if formula is None or microbatches < formula.least(ranks) or not times.are_alike:
        return None
    f, b, w = times.forward[0], times.input[0], times.weight[0]
    return Expected(formula.text, (ranks - 1) * formula.idle(f, b, w)) if formula.holds(f, b, w) else None
