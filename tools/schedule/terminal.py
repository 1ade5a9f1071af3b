"""A schedule as text: a row for each rank, time from left to right.

It is legible with colours and without.  A schedule that is wider than the terminal loses its
middle, so that the pipeline is seen to fill and to drain.
"""

from collections.abc import Iterator, Sequence

from attrs import frozen

from ...compiler.schedules.actions import Action, Work
from ...compiler.schedules.timeline import Slot
from .picture import HUES, WORDS, Picture, label, number, terminal_colour, ticks

GAP = " ⋯ "
_FILL = "─"
_APART = 10
"""The least columns from one tick of the axis to the next."""


def drawing(picture: Picture, width: int, *, colour: bool) -> str:
    """The schedule in at most `width` columns, unless these are too few for anything, and a
    legend.
    """
    grid = _Grid(picture, width, colour)
    return "\n".join((*grid.lines(), "", *grid.legend()))


@frozen
class _Window:
    """The columns that are shown, from `start` to before `stop`."""

    start: int
    stop: int

    def cut(self, text: str, column: int) -> str:
        """The part of a text that is inside; the text begins at `column`."""
        return text[max(self.start - column, 0) : max(self.stop - column, 0)]

    def has(self, text: str, column: int) -> bool:
        """Whether all of a text is inside."""
        return self.start <= column and column + len(text) <= self.stop


class _Grid:
    def __init__(self, picture: Picture, width: int, colour: bool) -> None:
        self._picture, self._colour = picture, colour
        # where colours do not tell stages apart, labels do
        self._tells_stage = picture.depth > (len(HUES) if colour else 1)
        longest = max(len(self._label(slot.action)) for slot in picture.slots)
        # columns for a unit of time: every label fits, with a blank
        self._scale = (longest + 1) / picture.shortest
        self._margin = len(f"rank {picture.schedule.ranks - 1}  ")
        self._columns = self._column(picture.timeline.total)
        self._windows = self._choose_windows(width - self._margin)

    def lines(self) -> Iterator[str]:
        """The axis, and a row for each rank."""
        marks = self._marks()
        yield self._line("time", [_axis(marks, window) for window in self._windows])
        for rank, row in enumerate(self._picture.timeline.slots):
            yield self._line(f"rank {rank}", [self._part(row, window) for window in self._windows])

    def legend(self) -> Iterator[str]:
        """The legend: letters, colours and gaps."""
        yield ", ".join(f"{work.value} {WORDS[work]}" for work in self._picture.works)
        if self._tells_stage:
            yield "2F1: stage 2, forward, microbatch 1"
        elif self._picture.depth > 1:
            yield "  ".join(self._swatch(chunk) for chunk in range(self._picture.depth))
        if len(self._windows) > 1:
            yield (
                f"the middle is left out: all of it takes {self._margin + self._columns:,}"
                " columns, --svg or --html"
            )

    def _choose_windows(self, room: int) -> tuple[_Window, ...]:
        if self._columns <= room:
            return (_Window(0, self._columns),)
        half = max(1, (room - len(GAP)) // 2)
        return _Window(0, half), _Window(self._columns - half, self._columns)

    def _line(self, head: str, parts: Sequence[str]) -> str:
        return f"{head:<{self._margin}}{GAP.join(parts)}".rstrip()

    def _part(self, row: Sequence[Slot], window: _Window) -> str:
        """One rank's row inside a window."""
        text, column = "", window.start
        for slot in row:
            start, end = self._column(slot.start), self._column(slot.end)
            if start < window.stop and end > window.start:
                text += " " * (start - column) + self._cell(slot.action, start, end, window)
                column = end
        return text + " " * (window.stop - column)

    def _cell(self, action: Action, start: int, end: int, window: _Window) -> str:
        """An action and a blank after it; no label that would be cut, since `F1` of `F12` is
        another microbatch.
        """
        wide, label = end - start, self._label(action)
        if len(label) > wide or not window.has(label, start):
            label = ""
        cell = label.ljust(max(wide - 1, min(wide, 1)), " " if self._colour else _FILL)
        blank = ""
        if len(cell) < wide:
            blank = window.cut(" ", end - 1)
        chunk = self._picture.chunks[action.stage]
        return self._paint(window.cut(cell, start), chunk, action.work) + blank

    def _marks(self) -> list[tuple[str, int]]:
        """The labels of the axis, with their columns."""
        times = ticks(self._picture.timeline.total, _APART / self._scale)
        return [(number(time), self._column(time)) for time in times]

    def _swatch(self, chunk: int) -> str:
        letters = "".join(
            self._paint(f" {work.value} ", chunk, work) for work in self._picture.works
        )
        return f"{letters} {self._picture.stages_of(chunk)}"

    def _label(self, action: Action) -> str:
        return str(action) if self._tells_stage else label(action)

    def _column(self, time: float) -> int:
        return int(time * self._scale + 0.5)

    def _paint(self, text: str, chunk: int, work: Work) -> str:
        if not self._colour or not text:
            return text
        return f"\x1b[38;5;16;48;5;{terminal_colour(chunk, work)}m{text}\x1b[0m"


def _axis(marks: Sequence[tuple[str, int]], window: _Window) -> str:
    """The labels of the axis that are inside a window."""
    text = ""
    for mark, column in marks:
        if window.has(mark, column):
            text = text.ljust(column - window.start) + mark
    return text.ljust(window.stop - window.start)
