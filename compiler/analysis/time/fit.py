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
"""The least change of a figure that is named, and the least part of the step that it makes up."""

ROUNDS, WEIGHINGS = 4, 12
"""How often the search follows the slopes of predictions, and how often it weighs the
differences that these leave.
"""

STEPS = (1.0, 0.5, 0.25, 0.125)
"""The parts of the way along slopes that are tried, for these bend where a collective is no
longer hidden.
"""

UNEXPLAINED = 0.001
"""How much differences may grow as a change is left out, as a part of the step."""

NEAR, PRIOR = 0.001, 0.01
"""The part of a step below which differences count by their squares, above by themselves; what a
change costs, in steps by squares of logarithms, so that a figure which explains hardly anything
stays."""


@frozen
class Figure:
    """Something that takes time, and where a file of hardware says how much.

    fields  of `Hardware`, in a file's words too
    table   of `Measured`, whose rows win
    nodes   whether the rows are of groups on several nodes; None where that makes no difference
    """

    name: str
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
        "links between nodes",
        "link: adapters",
        {"network": "bandwidth", "network_latency": "latency"},
        "collectives",
        True,
    ),
    Figure("issuing an op", "host", {"op": "op"}),
    Figure("issuing a collective", "host", {"collective": "collective"}),
)


@frozen
class Fit:
    """Hardware whose prediction is nearest to a profile.

    changes  how many times longer the seconds of each figure are; only figures that make a
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
        lines = beside(profile, step_time(program, _make_changed_hardware(on, logs)))
        excess = list[float]()
        for line in sorted(lines, key=lambda line: line.name):
            for kind in KINDS:
                excess.append(line.measured.get(kind, 0.0) - line.predicted.get(kind, 0.0))
        return numpy.array(excess) / step

    every = range(len(FIGURES))
    logs = _with_fewest(differs, _nearest(differs, numpy.zeros(len(FIGURES)), every))
    shares = abs(_slopes(differs, logs, differs(logs), every) * logs).sum(0)
    named = numpy.where((abs(logs) > LEAST) & (shares > SHARE), logs, 0.0)
    fitted = _make_changed_hardware(on, named)
    changes: dict[str, float] = {}
    for figure, log_change in zip(FIGURES, named, strict=True):
        if log_change:
            changes[figure.name] = exp(log_change)
    return Fit(fitted, changes, tuple(beside(profile, step_time(program, fitted))))


Differs = Callable[[Any], Any]
"""By the logarithms of changes, the differences of lines as parts of the step."""


def _nearest(differs: Differs, start: Any, free: Sequence[int]) -> Any:
    """The logarithms with the least sum of differences, where only the logarithms of `free` figures
    change from `start` on.
    """
    import numpy as np

    numpy: Any = np
    if not free:
        return start
    logs, differences, columns = start, differs(start), [*free]
    for _ in range(ROUNDS):
        slope = _slopes(differs, logs, differences, columns)
        moved = numpy.zeros(len(columns))
        for _ in range(WEIGHINGS):
            weighed = slope.T / numpy.maximum(abs(differences + slope @ moved), NEAR)
            normal = weighed @ slope + PRIOR * numpy.eye(len(columns))
            moved = numpy.linalg.solve(normal, -weighed @ differences - PRIOR * logs[columns])
        for part in STEPS:
            next_logs = logs.copy()
            next_logs[columns] += part * numpy.clip(moved, -log(2), log(2))
            next_differences = differs(next_logs)
            if _cost(next_differences, next_logs) < _cost(differences, logs):
                logs, differences = next_logs, next_differences
                break
        else:
            break
    return logs


def _with_fewest(differs: Differs, logs: Any) -> Any:
    """The logarithms without changes that others can do the work of, tried from the smallest on.

    Computing beside a collective is slower, and longer products hide more of it: near such a bend
    the search along slopes is slow, and spreads over several figures what one of them explains.
    """
    needed = set[int]()
    least = _cost(differs(logs), logs)
    while True:
        figures = [figure for figure in range(len(logs)) if logs[figure] and figure not in needed]
        if not figures:
            return logs
        smallest = min(figures, key=lambda figure: float(abs(logs[figure])))
        without = logs.copy()
        without[smallest] = 0.0
        free = [figure for figure in range(len(logs)) if without[figure]]
        without = _nearest(differs, without, free)
        cost = _cost(differs(without), without)
        if cost > least + UNEXPLAINED:
            needed.add(smallest)
        else:
            logs, least = without, min(least, cost)


def _slopes(differs: Differs, logs: Any, differences: Any, columns: Sequence[int]) -> Any:
    """How fast `differences`, which belong to `logs`, grow with the logarithm of each of some
    figures.
    """
    import numpy as np

    steps = np.eye(len(logs))[[*columns]] * LEAST
    return np.stack([(differs(logs + step) - differences) / LEAST for step in steps], 1)


def _cost(differences: Any, logs: Any) -> float:
    """The sum that the search makes small: of differences, and a little of the changes."""
    return float(abs(differences).sum() + PRIOR * (logs**2).sum())


def _make_changed_hardware(on: Hardware, logs: Any) -> Hardware:
    for figure, log_change in zip(FIGURES, logs, strict=True):
        if log_change:
            on = slower(on, figure, exp(log_change))
    return on


def slower(on: Hardware, figure: Figure, times: float) -> Hardware:
    """The hardware where all the work of a figure takes a multiple of its time."""
    changed: dict[str, Any] = {}
    for name in figure.fields:
        factor = 1 / times if name in RATES else times
        changed[name] = _make_scaled(getattr(on, name), factor)
    if figure.table:
        rows = tuple(_row(row, figure, times) for row in getattr(on.measured, figure.table))
        changed["measured"] = evolve(on.measured, **{figure.table: rows})
    return evolve(on, **changed)


def _make_scaled(figure: Any, times: float) -> Any:
    """A number, or one for each element type."""
    if isinstance(figure, Mapping):
        figures = cast(Mapping[str, float], figure)
        return {dtype: number * times for dtype, number in figures.items()}
    return figure * times


def _row(row: Any, figure: Figure, times: float) -> Any:
    if figure.nodes is not None and figure.nodes != (row.nodes > 1):
        return row
    if figure.table == "attention":
        return row._replace(forward=row.forward / times, backward=row.backward / times)
    return row._replace(seconds=row.seconds * times)
