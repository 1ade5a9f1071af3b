"""Ranks' rows as shapes: actions with their stages in boxes, waiting as blanks, messages as arrows.

A schedule that is too long for one line goes on in the next, as music does; an excerpt has the
beginning and the end.  A picture is SVG, or a page with a row for each rank, zoomed by wheel and
dragged.
"""

from collections.abc import Callable, Iterator, Sequence
from math import ceil
from statistics import median
from typing import Any

from attrs import frozen

from ...compiler.schedules.actions import Action, Work
from ...compiler.schedules.timeline import Slot
from ...compiler.syntax.package_data import fill_template
from ..drawing import LETTER, Canvas, text_width, ticks
from .picture import HUES, MARK, WORDS, Picture, colour, number

LEFT, ROW, LOW, BAR, FOOT = 56, 24, 14, 19, 30
MOST = 4
"""How many lines an excerpt has at most; a longer schedule is shown whole without words, and its
two ends with words.
"""

WHOLE = "the whole step"
BARS = 8000
"""The most actions of the whole step that are drawn by themselves."""

ARROWS = 400
"""The most messages whose arrows are drawn in a line: more hide what they show."""


@frozen
class Line:
    """The time that a line of the drawing shows, and the line's name if it does not show all."""

    start: float
    end: float
    name: str = ""


def fills(picture: Picture) -> dict[str, str]:
    """The colours of classes of actions."""
    colours: dict[str, str] = {}
    for chunk in range(picture.depth):
        for work in picture.works:
            colours[style(chunk, work)] = f"#{colour(chunk, work)}"
    return colours


def style(chunk: int, work: Work) -> str:
    """The class of an action, by its stage's place on its rank."""
    return f"{work.value}{chunk % len(HUES)}"


def lines(picture: Picture, width: float, least: float = 0) -> list[Line]:
    """As many lines as all labels need of actions that take `least`, by default the shortest that
    has one.

    Each begins a little before the last one's end, so that none is cut in two.
    """
    least = least or picture.shortest
    total, room, shared = picture.timeline.total, _room(picture, width, least), 2 * least
    if total <= room:
        return [Line(0, total)]
    count = ceil((total - shared) / (room - shared))
    step = (total - shared) / count
    return [Line(number * step, (number + 1) * step + shared) for number in range(count)]


def excerpt(picture: Picture, width: float) -> list[Line]:
    """All lines, where they are few; else the whole in one line, and its two ends, where half of
    all actions have labels.
    """
    usual = median(slot.end - slot.start for slot in picture.slots)
    all_lines = lines(picture, width, usual)
    if len(all_lines) <= MOST:
        return all_lines
    total, room = picture.timeline.total, _room(picture, width, usual)
    return [
        Line(0, total, WHOLE),
        Line(0, room, "the beginning"),
        Line(total - room, total, "the end"),
    ]


def _room(picture: Picture, width: float, least: float) -> float:
    """The time that a line has room for, with a label in each action that takes `least`."""
    longest = max(len(str(slot.action)) for slot in picture.slots)
    return (width - LEFT) / ((longest + 1) * LETTER) * least


def draw(
    canvas: Canvas, picture: Picture, line: Line, top: float, write: Callable[[float], str] = number
) -> float:
    """Draws a line from `top` on, its times in the words of `write`; returns where it ends."""
    if line.name:
        canvas.words(0, top + 11, line.name, "head")
        top += 18
    ranks = picture.schedule.ranks
    row = min(max(ROW * 16 / ranks, 5.0), LOW if line.name == WHOLE else ROW)
    drawing = _Line(canvas, picture, line, top, row)
    drawing.axis(write)
    for rank, slots in enumerate(picture.timeline.slots):
        drawing.row(rank, slots)
    drawing.arrows()
    return top + ranks * row + FOOT


class _Line:
    def __init__(
        self, canvas: Canvas, picture: Picture, line: Line, top: float, row: float
    ) -> None:
        self._canvas, self._picture, self._line = canvas, picture, line
        self._top, self._row = top, row
        self._scale = (canvas.width - LEFT) / (line.end - line.start)
        self._bar = min(BAR, row - 1)

    def axis(self, write: Callable[[float], str]) -> None:
        """Draws round times, and lines where they are."""
        foot = self._top + self._picture.schedule.ranks * self._row
        for time in ticks(self._line.end, most=max(int(10 * self._line.end / self._span), 1)):
            if time >= self._line.start:
                x = self._x(time)
                self._canvas.line(x, self._top - 2, x, foot + 2)
                style = "end muted" if x > self._canvas.width - 30 else "mid muted"
                self._canvas.words(x, foot + 13, write(time), style)

    @property
    def _span(self) -> float:
        return self._line.end - self._line.start

    def row(self, rank: int, slots: Sequence[Slot]) -> None:
        """Draws a rank's actions; where it waits, its row is blank."""
        y = self._top + rank * self._row
        if self._row > 10:
            self._canvas.words(0, y + self._bar / 2 + 4, f"rank {rank}")
        self._canvas.box(LEFT, y, self._canvas.width - LEFT, self._bar, "idle", round=0)
        if self._line.name == WHOLE:
            self._bars(slots, y)
            return
        for slot in slots:
            if slot.end > self._line.start and slot.start < self._line.end:
                self._slot(slot, y)

    def _bars(self, slots: Sequence[Slot], y: float) -> None:
        """Draws actions without words, all of one colour as one shape; an action that is too
        narrow is part of its neighbour.
        """
        least = max((self._canvas.width - LEFT) * self._picture.schedule.ranks / BARS, 0.5)
        # edges, and the longest action in them with its class
        bars: list[tuple[float, float, float, str]] = []
        for slot in slots:
            left, right = self._x(slot.start), self._x(slot.end)
            width, name = right - left, self._style(slot)
            if bars and left - bars[-1][0] < least:
                left, _, longest, name_of_longest = bars.pop()
                width, name = max((width, name), (longest, name_of_longest))
            bars.append((left, right, width, name))
        ends_by_name: dict[str, list[tuple[float, float]]] = {}
        for left, right, _, name in bars:
            ends_by_name.setdefault(name, []).append((left, right))
        for name, ends in ends_by_name.items():
            self._canvas.bars(ends, y + self._bar / 2, self._bar, f"k{name}")

    def _style(self, slot: Slot) -> str:
        return style(self._picture.chunks[slot.action.stage], slot.action.work)

    def _slot(self, slot: Slot, y: float) -> None:
        """Draws the part of an action that is in this line."""
        left = self._x(max(slot.start, self._line.start))
        right = self._x(min(slot.end, self._line.end))
        gap = 1 if right - left > 3 else 0
        width = right - left - gap
        self._canvas.box(left, y, width, self._bar, f"act {self._style(slot)}", round=0)
        words = str(slot.action)
        if right - left >= text_width(words) and self._row > 14:
            self._canvas.words((left + right) / 2, y + 13, words, "mid on")

    def arrows(self) -> None:
        """Draws messages between ranks, from the action that makes a value to the action that
        takes it.
        """
        shown: list[tuple[Slot, Slot]] = []
        for maker, taker in messages(self._picture):
            if self._shows(maker.end) and self._shows(taker.start):
                shown.append((maker, taker))
        if len(shown) > ARROWS or self._row <= 14:
            return
        owner = self._picture.schedule.stage_to_rank
        for maker, taker in shown:
            y = self._middle(owner[maker.action.stage])
            to_y = self._middle(owner[taker.action.stage])
            down = 1 if to_y > y else -1
            edge = down * self._bar / 2
            x, to_x = self._x(maker.end) - 3, self._x(taker.start) + 3
            self._canvas.arrow(x, y + edge - down * 3, to_x, to_y - edge + down * 2, "arrow sent")

    def _middle(self, rank: int) -> float:
        """The height of the middle of a rank's row."""
        return self._top + rank * self._row + self._bar / 2

    def _shows(self, time: float) -> bool:
        return self._line.start <= time <= self._line.end

    def _x(self, time: float) -> float:
        return LEFT + (time - self._line.start) * self._scale


def messages(picture: Picture) -> Iterator[tuple[Slot, Slot]]:
    """Pairs of actions of two ranks: the second takes what the first makes."""
    owner, last = picture.schedule.stage_to_rank, picture.schedule.stages - 1
    slots: dict[tuple[int, bool, int], Slot] = {}
    for slot in picture.slots:
        action = slot.action
        if action.work is not Work.WEIGHT:
            slots[action.stage, action.work is Work.FORWARD, action.microbatch] = slot
    for (stage, forward, microbatch), slot in slots.items():
        to = stage + 1 if forward else stage - 1
        if 0 <= to <= last and owner[to] != owner[stage]:
            yield slot, slots[to, forward, microbatch]


def legend(canvas: Canvas, picture: Picture, top: float) -> float:
    """Draws the meaning of letters and colours; returns where it ends."""
    letters = ", ".join(f"{work.value} {WORDS[work]}" for work in picture.works)
    label = Action(1, picture.works[0], 2)
    canvas.words(
        0,
        top + 11,
        f"{label}: stage 1, {WORDS[label.work]}, microbatch 2; {letters}; blank: waiting",
        "muted",
    )
    x, y = 0.0, top + 20
    for chunk in range(picture.depth):
        stages = picture.stages_of(chunk)
        if x + 26 * len(picture.works) + text_width(stages) + 30 > canvas.width:
            x, y = 0.0, y + 24
        for work in picture.works:
            canvas.box(x, y, 24, 18, f"act {style(chunk, work)}", round=0)
            canvas.words(x + 12, y + 13, work.value, "mid on")
            x += 25
        canvas.words(x + 4, y + 13, stages)
        x += text_width(stages) + 24
    return y + 30


WIDTH = 1200


def svg(picture: Picture, table: str = "") -> str:
    """The text of the file, with the lines of a table, as `figures` makes it, below the rows."""
    canvas = Canvas(WIDTH)
    canvas.words(0, 14, picture.title, "head")
    canvas.words(0, 30, picture.subtitle)
    y = 44.0
    for line in lines(picture, WIDTH):
        y = draw(canvas, picture, line, y)
    y = legend(canvas, picture, y + 4)
    for row in table.splitlines():
        y += 15
        canvas.words(0, y, row, "pre")
    return canvas.file(picture.title, MARK, fills(picture))


def html(picture: Picture, table: str = "") -> str:
    """The text of the file, with a table, as `figures` makes it, below the rows."""
    chunks: list[tuple[str, list[tuple[str, str]]]] = []
    for chunk in range(picture.depth):
        colours = [(work.value, f"#{colour(chunk, work)}") for work in picture.works]
        chunks.append((picture.stages_of(chunk), colours))
    return fill_template(
        "schedule.html.j2",
        escaped=True,
        mark=MARK,
        title=picture.title,
        subtitle=picture.subtitle,
        table=table,
        works=[(work.value, WORDS[work]) for work in picture.works],
        chunks=chunks,
        drawn={
            "total": picture.timeline.total,
            "rows": _rows(picture),
            "words": {work.value: WORDS[work] for work in picture.works},
            "messages": _messages(picture),
            "unit": picture.unit,
        },
    )


def _messages(picture: Picture) -> list[list[float]]:
    """Each message between ranks: its source and when it leaves, its target and when it is
    taken, its microbatch.
    """
    owner = picture.schedule.stage_to_rank
    rows: list[list[float]] = []
    for maker, taker in messages(picture):
        source, target = owner[maker.action.stage], owner[taker.action.stage]
        rows.append([source, maker.end, target, taker.start, maker.action.microbatch])
    return rows


def _rows(picture: Picture) -> list[list[list[Any]]]:
    """Each rank's actions: label, colour, letter, stage, microbatch, start, end."""
    rows: list[list[list[Any]]] = []
    for slots in picture.timeline.slots:
        row: list[list[Any]] = []
        for slot in slots:
            action = slot.action
            row.append(
                [
                    str(action),
                    f"#{colour(picture.chunks[action.stage], action.work)}",
                    action.work.value,
                    action.stage,
                    action.microbatch,
                    slot.start,
                    slot.end,
                ]
            )
        rows.append(row)
    return rows
