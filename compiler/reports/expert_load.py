"""The loads of a run's experts over its steps: a table for the terminal, and a picture with a heat
map for each layer.

A load is an expert's part of the choices of its layer, in equal shares: 1 where all experts are
chosen as often.  Non-goals: what a load costs (`analysis.expert_loads`).
"""

import json
from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby
from math import ceil, floor, log2
from statistics import fmean

from attrs import frozen

from .drawing import Canvas, wide
from .summary import table

MARK = "Written by scalec loads"
"""A mark in the opening lines of a picture."""

Shares = tuple[tuple[float, ...], ...]
"""Loads by layer and expert."""

TIMES = 5
"""How many steps the table has at most."""


@frozen
class Loads:
    """The logged steps of a run, in order, and of each the loads, and the part of choices that
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


def read(name: str, log: str) -> Loads | None:
    """The loads of a log of JSON lines; None where no line has any.

    The last counts of a step that was repeated.
    """
    found: dict[int, tuple[Shares, float | None]] = {}
    for line in log.splitlines():
        record = json.loads(line)
        if "expert_load" in record:
            found[record["step"]] = (
                tuple(map(_shares, record["expert_load"])),
                record.get("dropped"),
            )
    steps = tuple(sorted(found))
    if not steps:
        return None
    shares, dropped = zip(*map(found.__getitem__, steps), strict=True)
    return Loads(name, steps, shares, () if None in dropped else dropped)


def _shares(counts: Sequence[int]) -> tuple[float, ...]:
    """Equal where nothing is chosen at all."""
    total = sum(counts)
    return tuple(count * len(counts) / total if total else 1.0 for count in counts)


def text(loads: Loads) -> str:
    """A table of the least and the most load of each layer at some of the steps."""
    last = len(loads.steps) - 1
    places = [*dict.fromkeys(round(last * part / (TIMES - 1)) for part in range(TIMES))]
    rows = [("layer", "", *(f"step {loads.steps[at]:,}" for at in places))]
    for layer in range(loads.layers):
        each = (loads.shares[at][layer] for at in places)
        rows.append((str(layer), "", *(f"{min(own):.2f} – {max(own):.2f}" for own in each)))
    rows += (
        [("dropped", "", *(f"{loads.dropped[at]:.1%}" for at in places))] if loads.dropped else []
    )
    lines = "\n".join(table(rows))
    dropped = "; dropped, of all choices" * bool(loads.dropped)
    return (
        f"{loads.title}\n\n{lines}\n\nleast – most load of an expert of the layer; 1 is an"
        f" equal share{dropped}"
    )


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
"""Colours of loads below the first bound, from each to the next, and from the last on:
ColorBrewer's RdBu, reversed.
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
        self.canvas = Canvas(max(_LEFT + _WIDTH + _RIGHT, 24 + wide(loads.title)))
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
        shares = [
            [load for at in column for own in self._loads.shares[at] for load in own]
            for column in self._columns
        ]
        found = [[*map(max, shares)], [*map(min, shares)]]
        dropped = self._loads.dropped
        found += (
            [[fmean(dropped[at] for at in column) for column in self._columns]] if dropped else []
        )
        lines = dict(zip(LINES, found, strict=False))
        low = min(-1, floor(log2(max(min(lines["least"]), BOUNDS[0] / 2))))
        high = max(1, ceil(log2(max(lines["most"]))))

        def y(load: float) -> float:
            return top + _CHART * (high - log2(max(load, 2.0**low))) / (high - low)

        for power in range(low, high + 1):
            at, label = y(2.0**power), f"{2**power}" if power >= 0 else f"1/{2**-power}"
            self.canvas.line(_LEFT, at, _LEFT + _WIDTH, at)
            self.canvas.words(_LEFT - 6, at + 4, label, "end")
        for i, (name, loads) in enumerate(lines.items()):
            self.canvas.path(
                [(self._x(at + 0.5), y(load)) for at, load in enumerate(loads)],
                f"trace kc{LINES[name]}",
            )
            self._entry(LINES[name], name, top + 18 * i)
        self._steps(top + _CHART)

    def _heat_map(self, layer: int, top: int) -> None:
        """A row for each expert, a column for each step or for several; neighbours of one
        colour are one box.
        """
        self.canvas.words(_LEFT, top - 6, f"layer {layer}, a row for each expert")
        boxes: dict[str, list[tuple[float, float, float]]] = {}
        experts = len(self._loads.shares[0][layer])
        for expert in range(experts):
            loads = (
                fmean(self._loads.shares[at][layer][expert] for at in column)
                for column in self._columns
            )
            at = 0
            for colour, run in groupby(map(_colour, loads)):
                end = at + len([*run])
                boxes.setdefault(colour, []).append(
                    (self._x(at), top + expert * self._row, self._x(end))
                )
                at = end
        for colour, each in sorted(boxes.items()):
            self.canvas.cells(each, self._row, f"c{colour}")
        height = experts * self._row
        self.canvas.box(_LEFT, top, _WIDTH, height, "edge", round=0)
        for expert, y in {0: top + 11, experts - 1: top + height - 1}.items():
            self.canvas.words(_LEFT - 6, y, str(expert), "end")
        self._steps(top + height)

    def _steps(self, top: int) -> None:
        """The steps of some columns, under an axis."""
        last = len(self._columns) - 1
        for at in dict.fromkeys(round(last * part / (TIMES - 1)) for part in range(TIMES)):
            self.canvas.words(
                self._x(at + 0.5), top + 16, f"{self._loads.steps[self._columns[at][0]]:,}", "mid"
            )
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
    return (
        f"{BOUNDS[place - 1]:g} to {BOUNDS[place]:g}"
        if place < len(BOUNDS)
        else f"{BOUNDS[-1]:g} and more"
    )
