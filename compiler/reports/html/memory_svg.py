"""Memory over a step as areas by owner, the peak marked; what comes and goes has a scale of its own if it is small."""

from collections.abc import Sequence

from attrs import frozen

from ...config.units import amount
from ..drawing import Canvas, ticks, wide
from ..time import seconds
from .memory import Memory, Owner

WIDTH, LEFT, RIGHT = 1080, 76, 236
UNITS = 1024**3, 1024**2, 1024, 1
SMALL = 0.5
"""The part of all memory under which what comes and goes is drawn apart too."""


def drawing(it: Memory) -> str:
    """The picture."""
    canvas = Canvas(WIDTH)
    capacity = it.capacity if it.capacity and it.capacity < 1.6 * it.needs else 0
    whole = _Panel(canvas, it, it.owners, 34, 230, max(it.needs, capacity) * 1.04)
    whole.areas()
    whole.peak(f"peak: {amount(it.needs)}, {it.peak_words}")
    whole.capacity()
    most = max((sum(sizes) for sizes in zip(*(owner.bytes for owner in it.passing), strict=True)), default=0)
    if 0 < most < SMALL * it.needs:
        canvas.words(LEFT, 332, "what comes and goes, apart", "muted")
        apart = _Panel(canvas, it, it.passing, 344, 140, most * 1.08)
        apart.areas()
        apart.peak("")
    return canvas.svg("memory of a rank over a step, by owner")


@frozen
class _Panel:
    """Areas of some owners, from `top` on, `high` pixels for `most` bytes."""

    canvas: Canvas
    it: Memory
    owners: Sequence[Owner]
    top: float
    high: float
    most: float

    def areas(self) -> None:
        """The scale, the areas, their names, the parts of the step."""
        self._scale()
        edges = [[0.0] * len(self.it.xs)]
        for owner in self.owners:
            edges.append([below + size for below, size in zip(edges[-1], owner.bytes, strict=True)])
        for owner, low, high in zip(self.owners, edges, edges[1:], strict=False):
            note = f"{owner.name}: at most {amount(max(owner.bytes))}"
            foot, head = ([self._y(size) for size in edge] for edge in (low, high))
            self.canvas.stairs([_x(x) for x in (*self.it.xs, 1.0)], foot, head, f"s{owner.series} area", note)
        self._names(edges)
        self._phases()

    def _y(self, size: float) -> float:
        return self.top + self.high * (1 - size / self.most)

    def _scale(self) -> None:
        unit = next(unit for unit in UNITS if self.most >= 2 * unit or unit == 1)
        for tick in ticks(self.most / unit, most=max(int(self.high / 40), 2)):
            y = self._y(tick * unit)
            self.canvas.line(LEFT, y, WIDTH - RIGHT, y)
            self.canvas.words(LEFT - 8, y + 4, amount(round(tick * unit)).replace(".0", ""), "end muted")

    def _names(self, edges: list[list[float]]) -> None:
        """Names at the right, each near its band at the peak, none over another."""
        at, y = self.it.peak, self.top + self.high + 10.0
        for owner, low, high in zip(self.owners, edges, edges[1:], strict=False):
            y = min(self._y((low[at] + high[at]) / 2) + 4, y - 14)
            self.canvas.box(WIDTH - RIGHT + 10, y - 9, 9, 9, f"s{owner.series}")
            self.canvas.words(WIDTH - RIGHT + 24, y, f"{owner.name} {amount(owner.bytes[at])}")

    def _phases(self) -> None:
        ends = [*(start for _, start in self.it.phases[1:]), 1.0]
        for (name, start), end in zip(self.it.phases, ends, strict=False):
            x = _x(start)
            self.canvas.line(x, self.top, x, self.top + self.high + 6, "edge")
            if wide(name) + 8 < _x(end) - x or end == 1.0:
                self.canvas.words(x + 4, self.top + self.high + (30 if self.it.seconds else 16), name, "muted")
        self._times()

    def _times(self) -> None:
        """Round seconds below the areas."""
        total, foot = self.it.seconds or 0.0, self.top + self.high
        for tick in ticks(total, most=10):
            x = _x(tick / total)
            self.canvas.line(x, foot, x, foot + 4, "edge")
            self.canvas.words(x, foot + 16, seconds(tick), "mid muted")

    def capacity(self) -> None:
        """A line at what the GPU has."""
        if self.it.capacity and self.it.capacity <= self.most:
            y = self._y(self.it.capacity)
            self.canvas.line(LEFT, y, WIDTH - RIGHT, y, "cap")
            said = f"the GPU has {amount(self.it.capacity)}"
            self.canvas.box(LEFT + 8, y - 8, wide(said) + 8, 16, "page")
            self.canvas.words(LEFT + 12, y + 4, said, "alarm")

    def peak(self, said: str) -> None:
        """A mark at the peak, its words to the side where there is room."""
        x, at = _x(self.it.xs[self.it.peak]), self.it.peak
        self.canvas.line(x, self.top - 8, x, self.top + self.high, "mark")
        self.canvas.dot(x, self._y(sum(owner.bytes[at] for owner in self.owners)), 3.5, "ink")
        room = x + 8 + wide(said) < WIDTH
        self.canvas.words(x + (8 if room else -8), self.top - 12, said, "head" if room else "head end")


def _x(part: float) -> float:
    return LEFT + part * (WIDTH - LEFT - RIGHT)
