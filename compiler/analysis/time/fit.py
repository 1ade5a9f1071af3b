"""The figures of a hardware file that would explain how profiled steps differ from the
prediction.
"""

from collections.abc import Callable, Mapping, Sequence
from math import exp, log
from typing import Any, cast

from attrs import evolve, frozen

from ...ir import Program
from ..hardware import Hardware
from .profile import KINDS, Line, Profile, beside
from .step import step_time

RATES = {"held", "attention", "streamed", "link", "network"}
"""The figures that are larger where things take less time."""

LEAST, SHARE = 0.05, 0.01
"""The change of a figure, and the part of the step that it makes up, from which on it is named."""

ROUNDS, WEIGHINGS = 4, 12
"""How often the search follows the slopes of predictions, and how often it weighs the
differences that these leave.
"""

STEPS = (1.0, 0.5, 0.25, 0.125)
"""The parts of the way along slopes that are tried, for these bend where a collective is no
longer hidden.
"""

UNEXPLAINED = 0.001
"""The part of a step by which differences may grow as a change is left out."""

NEAR, PRIOR = 0.001, 0.01
"""The part of a step below which differences count by their squares, above by themselves; what a
change costs, in steps by squares of logarithms, so that a figure which explains hardly anything
stays."""


@frozen
class Figure:
    """Something that takes time, and where a file of hardware says how much.

    fields  of `Hardware`, in a file's words too
    table   of `Measured`, whose rows win
    nodes   whether the rows are those of groups on several nodes; None where that makes no
            difference
    """

    of: str
    place: str
    fields: Mapping[str, str]
    table: str = ""
    nodes: bool | None = None


FIGURES = (
    Figure("products", "gpu", {"held": "held"}, "products"),
    Figure("attention", "gpu", {"attention": "attention"}, "attention"),
    Figure("memory-bound ops", "gpu", {"streamed": "streamed"}, "moved"),
    Figure("shortest kernels", "gpu", {"kernel": "kernel"}),
    Figure(
        "links in a node",
        "link: node",
        {"link": "bandwidth", "link_latency": "latency"},
        "collectives",
        False,
    ),
    Figure(
        *(
            "links between nodes",
            "link: adapters",
            {"network": "bandwidth", "network_latency": "latency"},
        ),
        *("collectives", True),
    ),
    Figure("issuing an op", "host", {"op": "op"}),
    Figure("issuing a collective", "host", {"collective": "collective"}),
)


@frozen
class Fit:
    """Hardware on which the prediction is nearest to a profile.

    changes  by how many times the seconds of each figure are longer, of those that make a
             difference
    lines    of the profile, beside the prediction on this hardware
    """

    on: Hardware
    changes: Mapping[str, float]
    lines: tuple[Line, ...]


def fit(program: Program, on: Hardware, profile: Profile) -> Fit:
    """The fit to a profile by its lines' seconds of each kind: the least sum of differences, with
    the fewest changes.

    A line that differs by itself moves no figure, as differences count by themselves and not by
    their squares.
    """
    import numpy as np

    numpy: Any = np
    step = step_time(program, on).seconds

    def differs(logs: Any) -> Any:
        lines = sorted(
            beside(profile, step_time(program, _changed(on, logs))), key=lambda line: line.name
        )
        excess = [
            line.measured.get(kind, 0.0) - line.predicted.get(kind, 0.0)
            for line in lines
            for kind in KINDS
        ]
        return numpy.array(excess) / step

    every = range(len(FIGURES))
    own = _with_fewest(differs, _nearest(differs, numpy.zeros(len(FIGURES)), every))
    shares = abs(_slopes(differs, own, differs(own), every) * own).sum(0)
    named = numpy.where((abs(own) > LEAST) & (shares > SHARE), own, 0.0)
    fitted = _changed(on, named)
    changes = {it.of: exp(each) for it, each in zip(FIGURES, named, strict=True) if each}
    return Fit(fitted, changes, tuple(beside(profile, step_time(program, fitted))))


Differs = Callable[[Any], Any]
"""By the logarithms of changes, the differences of lines as parts of the step."""


def _nearest(differs: Differs, start: Any, free: Sequence[int]) -> Any:
    """The logarithms with the least sum of differences, where those of `free` figures change
    from `start` on.
    """
    import numpy as np

    numpy: Any = np
    own, at, columns = start, differs(start), [*free]
    for _ in range(ROUNDS if columns else 0):
        slope = _slopes(differs, own, at, columns)
        moved = numpy.zeros(len(columns))
        for _ in range(WEIGHINGS):
            weighed = slope.T / numpy.maximum(abs(at + slope @ moved), NEAR)
            normal = weighed @ slope + PRIOR * numpy.eye(len(columns))
            moved = numpy.linalg.solve(normal, -weighed @ at - PRIOR * own[columns])
        for part in STEPS:
            tried = own.copy()
            tried[columns] += part * numpy.clip(moved, -log(2), log(2))
            there = differs(tried)
            if _cost(there, tried) < _cost(at, own):
                own, at = tried, there
                break
        else:
            break
    return own


def _with_fewest(differs: Differs, own: Any) -> Any:
    """The logarithms without changes that others can do the work of, tried from the smallest on.

    Computing beside a collective is slower, and longer products hide more of it: near such a bend
    the search along slopes is slow, and spreads over several figures what one of them explains.
    """
    kept = set[int]()
    least = _cost(differs(own), own)
    while left := [figure for figure in range(len(own)) if own[figure] and figure not in kept]:
        smallest = min(left, key=lambda figure: float(abs(own[figure])))
        without = own.copy()
        without[smallest] = 0.0
        without = _nearest(
            differs, without, [figure for figure in range(len(own)) if without[figure]]
        )
        cost = _cost(differs(without), without)
        if cost > least + UNEXPLAINED:
            kept.add(smallest)
        else:
            own, least = without, min(least, cost)
    return own


def _slopes(differs: Differs, own: Any, at: Any, columns: Sequence[int]) -> Any:
    """By how much differences, `at` these logarithms, grow with the logarithm of each of some
    figures.
    """
    import numpy as np

    moved = np.eye(len(own))[[*columns]] * LEAST
    return np.stack([(differs(own + each) - at) / LEAST for each in moved], 1)


def _cost(at: Any, own: Any) -> float:
    """The sum that the search makes small: of differences, and a little of the changes."""
    return float(abs(at).sum() + PRIOR * (own**2).sum())


def _changed(on: Hardware, logs: Any) -> Hardware:
    for figure, each in zip(FIGURES, logs, strict=True):
        if each:
            on = slower(on, figure, exp(each))
    return on


def slower(on: Hardware, figure: Figure, times: float) -> Hardware:
    """The hardware where all that a figure is of takes a multiple of its time."""
    changed = {
        name: _scaled(getattr(on, name), 1 / times if name in RATES else times)
        for name in figure.fields
    }
    if figure.table:
        rows = tuple(_row(it, figure, times) for it in getattr(on.measured, figure.table))
        changed["measured"] = evolve(on.measured, **{figure.table: rows})
    return evolve(on, **changed)


def _scaled(figure: Any, times: float) -> Any:
    """A number, or one for each element type."""
    if isinstance(figure, Mapping):
        return {dtype: each * times for dtype, each in cast(Mapping[str, float], figure).items()}
    return figure * times


def _row(it: Any, figure: Figure, times: float) -> Any:
    if figure.nodes is not None and figure.nodes != (it.nodes > 1):
        return it
    if figure.table == "attention":
        return it._replace(forward=it.forward / times, backward=it.backward / times)
    return it._replace(seconds=it.seconds * times)
