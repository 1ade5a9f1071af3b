"""The loads of a run's experts over its steps: a table for the terminal, and a picture with a heat
map for each layer.

A load is an expert's part of the choices of its layer, in equal shares: 1 where all experts are
chosen as often.  Non-goals: what a load costs (`analysis.expert_loads`).
"""

import json
from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain, groupby
from math import ceil, floor, log2
from statistics import fmean

from attrs import frozen

from ...compiler.reports.summary import table
from ..drawing import Canvas, text_width

MARK = "Written by scalec loads"
"""A mark in the opening lines of a picture."""

Shares = tuple[tuple[float, ...], ...]
"""Loads by layer and expert."""

TIMES = 5
"""How many steps the table has at most."""


@frozen
class Loads:
    """The logged steps of a run, in order; for each step its loads, and the part of choices that
    a capacity dropped.
    """

    name: str
    steps: tuple[int, ...]
    shares: tuple[Shares, ...]
    dropped: tuple[float, ...] = ()

    @property
    def layers(self) -> int:
        """The number of layers with experts."""
        return len(self.shares[0])

    @property
    def experts(self) -> int:
        """The largest number of experts of a layer."""
        return max(map(len, self.shares[0]))

    @property
    def title(self) -> str:
        """For instance `tiny: loads of 8 experts in 2 layers, steps 10 to 120`."""
        layers = f"{self.layers} layer{'s' * (self.layers > 1)}"
        return (
            f"{self.name}: loads of {self.experts} experts in {layers}, steps"
            f" {self.steps[0]:,} to {self.steps[-1]:,}"
        )


def parse_log(name: str, log: str) -> Loads | None:
    """The loads of a log of JSON lines; None where no line has any.

    Where a step was repeated, its last line counts.
    """
    shares_by_step: dict[int, Shares] = {}
    dropped_by_step: dict[int, float | None] = {}
    for line in log.splitlines():
        record = json.loads(line)
        if "expert_load" in record:
            step = record["step"]
            shares_by_step[step] = tuple(map(_shares, record["expert_load"]))
            dropped_by_step[step] = record.get("dropped")
    steps = tuple(sorted(shares_by_step))
    if not steps:
        return None
    shares = tuple(shares_by_step[step] for step in steps)
    dropped: list[float] = []
    for step in steps:
        share_dropped = dropped_by_step[step]
        # without a capacity a run drops nothing, and its log does not say so
        if share_dropped is None:
            return Loads(name, steps, shares)
        dropped.append(share_dropped)
    return Loads(name, steps, shares, tuple(dropped))


def _shares(counts: Sequence[int]) -> tuple[float, ...]:
    """The load of each expert; all are 1 where nothing is chosen at all."""
    total = sum(counts)
    if not total:
        return (1.0,) * len(counts)
    return tuple(count * len(counts) / total for count in counts)


def text(loads: Loads) -> str:
    """A table of the least and the most load of each layer at some of the steps."""
    places = _spread(len(loads.steps))
    rows: list[tuple[str, ...]] = [
        ("layer", "", *(f"step {loads.steps[place]:,}" for place in places))
    ]
    for layer in range(loads.layers):
        cells = [str(layer), ""]
        for place in places:
            loads_of_layer = loads.shares[place][layer]
            cells.append(f"{min(loads_of_layer):.2f} – {max(loads_of_layer):.2f}")
        rows.append(tuple(cells))
    if loads.dropped:
        rows.append(("dropped", "", *(f"{loads.dropped[place]:.1%}" for place in places)))
    lines = "\n".join(table(rows))
    dropped = "; dropped, of all choices" * bool(loads.dropped)
    return (
        f"{loads.title}\n\n{lines}\n\nleast – most load of an expert of the layer; 1 is an"
        f" equal share{dropped}"
    )


def _spread(count: int) -> list[int]:
    """At most `TIMES` of the indices below `count`, as evenly as they go, the first and the last
    among them.
    """
    last = count - 1
    return [*dict.fromkeys(round(last * part / (TIMES - 1)) for part in range(TIMES))]


# ---- the picture

_LEFT, _RIGHT, _TOP = 64, 190, 56
_WIDTH, _CHART, _APART = 720, 128, 40
# pixels: the least and the most height of an expert's row, the usual one of a heat map
_ROW, _PANEL = (2, 16), 160
_CELLS = 200_000
"""The most cells of a picture: where a run has more steps than there is room for, a column is
the mean of several.
"""

BOUNDS = (0.125, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0, 8.0)
COLOURS: tuple[str, ...] = (
    "053061",
    "2166ac",
    "67a9cf",
    "d1e5f0",
    "f7f7f7",
    "fddbc7",
    "ef8a62",
    "b2182b",
    "67001f",
)
"""The colours of loads: below the first bound, between a bound and the next, above the last.
They are ColorBrewer's RdBu, reversed.
"""

LINES = {"most": COLOURS[-2], "least": COLOURS[1], "dropped, of choices": "808080"}


def svg(loads: Loads) -> str:
    """The text of the file."""
    picture = _Picture(loads)
    picture.draw()
    fills = {f"c{colour}": f"#{colour}" for colour in (*COLOURS, *LINES.values())}
    return picture.canvas.file(loads.title, MARK, fills)


class _Picture:
    def __init__(self, loads: Loads) -> None:
        self.canvas = Canvas(max(_LEFT + _WIDTH + _RIGHT, 24 + text_width(loads.title)))
        self._loads = loads
        count = max(1, min(len(loads.steps), _WIDTH // 2, _CELLS // (loads.layers * loads.experts)))
        ends = [len(loads.steps) * i // count for i in range(count + 1)]
        self._columns = [*map(range, ends, ends[1:])]
        self._row = min(max(_PANEL // loads.experts, _ROW[0]), _ROW[1])

    def draw(self) -> None:
        self.canvas.words(12, 20, self._loads.title, "head")
        self.canvas.words(
            12, 40, "least and most load of an expert of any layer; 1 is an equal share"
        )
        self._chart(_TOP)
        first = _TOP + _CHART + _APART
        for i, colour in enumerate(reversed(COLOURS)):
            self._entry(colour, _meaning(len(BOUNDS) - i), first + 18 * i)
        for layer in range(self._loads.layers):
            self._heat_map(layer, first + layer * (self._row * self._loads.experts + _APART))

    def _chart(self, top: int) -> None:
        """The least and the most load of all layers, and what was dropped, on a scale of powers
        of two.
        """
        most, least = list[float](), list[float]()
        for column in self._columns:
            loads: list[float] = []
            for index in column:
                loads.extend(chain.from_iterable(self._loads.shares[index]))
            most.append(max(loads))
            least.append(min(loads))
        series = [most, least]
        dropped = self._loads.dropped
        if dropped:
            series.append([fmean(dropped[column.start : column.stop]) for column in self._columns])
        lines = dict(zip(LINES, series, strict=False))
        low = min(-1, floor(log2(max(min(lines["least"]), BOUNDS[0] / 2))))
        high = max(1, ceil(log2(max(lines["most"]))))

        def y(load: float) -> float:
            return top + _CHART * (high - log2(max(load, 2.0**low))) / (high - low)

        for power in range(low, high + 1):
            height = y(2.0**power)
            label = f"{2**power}" if power >= 0 else f"1/{2**-power}"
            self.canvas.line(_LEFT, height, _LEFT + _WIDTH, height)
            self.canvas.words(_LEFT - 6, height + 4, label, "end")
        for i, (name, loads) in enumerate(lines.items()):
            points = [(self._x(column + 0.5), y(load)) for column, load in enumerate(loads)]
            self.canvas.path(points, f"trace kc{LINES[name]}")
            self._entry(LINES[name], name, top + 18 * i)
        self._steps(top + _CHART)

    def _heat_map(self, layer: int, top: int) -> None:
        """A row for each expert, a column for each step or for several; neighbours of one
        colour are one box.
        """
        self.canvas.words(_LEFT, top - 6, f"layer {layer}, a row for each expert")
        boxes: dict[str, list[tuple[float, float, float]]] = {}
        shares = self._loads.shares
        experts = len(shares[0][layer])
        for expert in range(experts):
            colours: list[str] = []
            for column in self._columns:
                colours.append(_colour(fmean(shares[step][layer][expert] for step in column)))
            start = 0
            for colour, run in groupby(colours):
                end = start + len([*run])
                box = (self._x(start), top + expert * self._row, self._x(end))
                boxes.setdefault(colour, []).append(box)
                start = end
        for colour, boxes_of_colour in sorted(boxes.items()):
            self.canvas.cells(boxes_of_colour, self._row, f"c{colour}")
        height = experts * self._row
        self.canvas.box(_LEFT, top, _WIDTH, height, "edge", round=0)
        for expert, y in {0: top + 11, experts - 1: top + height - 1}.items():
            self.canvas.words(_LEFT - 6, y, str(expert), "end")
        self._steps(top + height)

    def _steps(self, top: int) -> None:
        """The steps of some columns, under an axis."""
        for place in _spread(len(self._columns)):
            step = self._loads.steps[self._columns[place][0]]
            self.canvas.words(self._x(place + 0.5), top + 16, f"{step:,}", "mid")
        self.canvas.words(_LEFT - 6, top + 16, "step", "end")

    def _entry(self, colour: str, words: str, top: int) -> None:
        """An entry of a legend, at the right."""
        x = _LEFT + _WIDTH + 16
        self.canvas.box(x, top, 14, 14, f"c{colour}", round=0)
        self.canvas.words(x + 20, top + 11, words)

    def _x(self, column: float) -> float:
        return _LEFT + _WIDTH * column / len(self._columns)


def _colour(load: float) -> str:
    return COLOURS[bisect_right(BOUNDS, load)]


def _meaning(place: int) -> str:
    """The loads of a colour, for instance `0.5 to 0.8`."""
    if place == 0:
        return f"below {BOUNDS[0]:g}"
    if place == len(BOUNDS):
        return f"{BOUNDS[-1]:g} and more"
    return f"{BOUNDS[place - 1]:g} to {BOUNDS[place]:g}"
