"""The drawing of a model: forward from top to bottom, backward's calls at its side, layers of a repeat once."""

from collections.abc import Iterator, Mapping
from itertools import accumulate, groupby
from math import ceil

from attrs import evolve

from ...config.units import amount
from ..drawing import LETTER, Canvas, fit, wide
from ..time import seconds
from .calls import Call
from .model import Model, Row, Shard, Stretch

WIDTH, BOX, MADE, BACK = 1080, 118, 430, 691
"""The width; where ops begin, what comes out of them, and the calls of backward."""

STEP = 25
SHEET = 860
"""The height of which a sheet of paper takes a picture without much loss of size."""

CELLS = 8
"""The most parts that a shard is drawn in."""


def drawings(it: Model, colours: Mapping[str, int]) -> list[str]:
    """The pictures of a page: each stretch by itself, a long one in parts, so that paper has places to break."""
    parts = [part for each in it.stretches for part in _sheets(each)]
    said = [f"{each.dim or 'ops'} with their collectives" for each in parts]
    return [drawn(evolve(it, stretches=(part,)), colours, heads=not at).svg(said[at]) for at, part in enumerate(parts)]


def _sheets(it: Stretch) -> Iterator[Stretch]:
    """A stretch in parts of about one height, each legible on a sheet of paper."""
    feet = [*accumulate(map(_height, it.rows))]
    most = feet[-1] / ceil(feet[-1] / SHEET)
    for at, group in groupby(zip(it.rows, feet, strict=True), key=lambda each: ceil(each[1] / most - 1e-9)):
        rows = tuple(row for row, _ in group)
        yield evolve(it, rows=rows, stages=it.stages if at == 1 else "; continued")


def _height(it: Row) -> int:
    return len(it.shards) * (STEP - 4) + STEP * max(bool(it.op) + len(it.calls), len(it.back))


def drawn(it: Model, colours: Mapping[str, int], *, heads: bool = True) -> Canvas:
    """The picture, with heads of columns; `colours` are the numbers of series of axes."""
    draw = _Drawing(colours)
    if heads:
        draw.heads()
    for stretch in it.stretches:
        draw.stretch(stretch)
    return draw.canvas


class _Drawing:
    def __init__(self, colours: Mapping[str, int]) -> None:
        self.canvas, self._colours, self._y, self._line = Canvas(WIDTH), colours, 1.0, ""

    def heads(self) -> None:
        """The heads of columns."""
        for x, text in ((0, "line"), (BOX, "forward ↓"), (MADE, "what comes out, on a rank"), (BACK, "backward ↑")):
            self.canvas.words(x, 12, text, "muted")
        self._y = 24

    def stretch(self, it: Stretch) -> None:
        """A stretch; layers are in a frame, with how many there are."""
        top = self._y
        if it.dim:
            self._y += 24
        for row in it.rows:
            self._row(row)
        if it.dim:
            self.canvas.box(BOX - 10, top + 2, WIDTH - BOX + 10, self._y - top, "edge", round=6)
            said = f"{it.dim} × {it.times:,}, drawn once{it.stages}"
            self.canvas.words(BOX, top + 18, said, "head")
        self._y += 10

    def _row(self, it: Row) -> None:
        if it.line != self._line:
            self.canvas.words(0, self._y + 15, _ending(it.line), "muted")
            self._line = it.line
        for shard in it.shards:
            self._shard(shard)
        top = self._y
        if it.op:
            self.canvas.box(BOX, top, MADE - BOX - 16, 20, "card", round=4)
            self.canvas.words(BOX + 8, top + 14, fit(it.op, MADE - BOX - 32))
            self.canvas.words(MADE, top + 14, fit(it.made, (BACK if it.back else WIDTH - 8) - MADE - 10), "muted")
            self._y += STEP
        for call in it.calls:
            self._call(call, BOX, self._y, BACK - BOX - 14, f"{call.op}: {call.cost}, {call.links}")
            self._y += STEP
        for at, call in enumerate(it.back):
            self._call(call, BACK, top + at * STEP, WIDTH - BACK - 8, _short(call))
        self._y = max(self._y, top + len(it.back) * STEP)

    def _call(self, it: Call, x: float, y: float, width: float, text: str) -> None:
        """A bar in the colour of its axis."""
        colour = self._colours.get(it.axes[0], 7)
        self.canvas.box(x, y, width, 20, f"p{colour}", it.note, 10)
        self.canvas.words(x + 10, y + 14, fit(text, width - 16))

    def _shard(self, it: Shard) -> None:
        """A parameter: the part of a rank among those of the others, its dims, its size."""
        x, y, wide_, high = BOX + 8, self._y + 3, 30, 14
        cells = min(it.degree, CELLS)
        colour = self._colours.get(it.axes[0], 7) if it.axes else 7
        self.canvas.box(
            x, y, wide_, high, "blank", "one box: what a rank has of it" if it.axes else "whole on each rank", 0
        )
        part = (wide_, high / cells) if it.at < 0.5 else (wide_ / cells, high)
        self.canvas.box(x, y, *part, f"s{colour}", round=0)
        said = f"{it.name} {it.type}"
        self.canvas.words(x + 38, self._y + 14, said)
        more = f"{amount(it.bytes)} on a rank" + (f", state over {', '.join(it.state)}" if it.state else "")
        self.canvas.words(max(MADE, x + 50 + wide(said)), self._y + 14, more, "muted")
        self._y += STEP - 4


def _ending(line: str) -> str:
    """A plan line whose number is whole."""
    most = int((BOX - 14) / LETTER)
    return line if len(line) <= most else f"…{line[1 - most :]}"


def _short(it: Call) -> str:
    """For instance `all_gather over tp: 560.0 GiB, 5.11 s`."""
    op = it.op.rpartition(", ")[0] if it.op.endswith("ranks") else it.op
    time = f", {seconds(it.seconds)}" if it.seconds is not None else ""
    return f"{op}{', recomputed' * it.recomputed}: {amount(it.sent)}{time}"
