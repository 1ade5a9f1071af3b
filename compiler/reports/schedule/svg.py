"""A schedule as a picture: SVG, or a page with a row for each rank, zoomed by wheel and dragged."""

from collections.abc import Iterator
from html import escape
from typing import Any

from ...schedules.actions import Work
from ...schedules.timeline import Slot
from ...syntax.package_data import filled
from .picture import HUES, MARK, WORDS, Picture, colour, label, number, ticks

_LETTER = 7  # the width of one, in pixels, as are all of these
_LEFT, _TOP, _EDGE = 60, 56, 12
_ROW, _BAR = 28, 24
_APART = 80  # from one tick of the axis to the next
_SWATCH = 26


def svg(picture: Picture) -> str:
    """The text of the file."""
    return "\n".join(_Svg(picture).lines()) + "\n"


class _Svg:
    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        self._tells_stage = picture.depth > len(HUES)
        longest = max(len(self._label(slot)) for slot in picture.slots)
        self._scale = (longest + 1) * _LETTER / picture.shortest
        self._foot = _TOP + picture.schedule.ranks * _ROW

    def lines(self) -> Iterator[str]:
        words = [self._picture.title, self._picture.subtitle, self._letters()]
        drawn = _LEFT + self._picture.timeline.total * self._scale
        width = number(round(max(drawn, _EDGE + max(map(len, words)) * _LETTER) + _EDGE))
        height = self._foot + 68 + 24 * self._picture.depth
        size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        yield f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
        yield f"<!-- {MARK} -->"
        yield from self._styles()
        yield '<rect width="100%" height="100%" fill="white"/>'
        yield f'<text class="title" x="{_EDGE}" y="20">{escape(words[0])}</text>'
        yield f'<text x="{_EDGE}" y="38">{escape(words[1])}</text>'
        yield from self._axis()
        for rank, row in enumerate(self._picture.timeline.slots):
            yield f'<text x="{_EDGE}" y="{_TOP + rank * _ROW + 16}">rank {rank}</text>'
            for slot in row:
                yield self._slot(slot, _TOP + rank * _ROW)
        yield from self._legend()
        yield "</svg>"

    def _styles(self) -> Iterator[str]:
        yield "<style>"
        yield f"text {{ font: {_LETTER * 5 / 3:.1f}px monospace; fill: #222222 }}"
        yield ".title { font-weight: bold }"
        yield ".middle { text-anchor: middle }"
        yield "line { stroke: #d0d0d0 }"
        yield "rect { stroke: white }"
        for chunk in range(self._picture.depth):
            for work in self._picture.works:
                yield f".{_style(chunk, work)} {{ fill: #{colour(chunk, work)} }}"
        yield "</style>"

    def _axis(self) -> Iterator[str]:
        for time in ticks(self._picture.timeline.total, _APART / self._scale):
            x = self._x(time)
            yield f'<line x1="{x}" y1="{_TOP - 4}" x2="{x}" y2="{self._foot + 4}"/>'
            yield f'<text class="middle" x="{x}" y="{self._foot + 18}">{number(time)}</text>'

    def _slot(self, slot: Slot, top: int) -> str:
        style = _style(self._picture.chunks[slot.action.stage], slot.action.work)
        width = _pixels((slot.end - slot.start) * self._scale)
        box = f'<rect class="{style}" x="{self._x(slot.start)}" y="{top}" width="{width}" height="{_BAR}"/>'
        middle, told = self._x((slot.start + slot.end) / 2), self._label(slot)
        if (slot.end - slot.start) * self._scale < len(told) * _LETTER:
            return box
        return f'{box}<text class="middle" x="{middle}" y="{top + 16}">{told}</text>'

    def _legend(self) -> Iterator[str]:
        top = self._foot + 48
        yield f'<text x="{_EDGE}" y="{top}">{self._letters()}</text>'
        for chunk in range(self._picture.depth):
            top += 24
            x = _EDGE
            for work in self._picture.works:
                yield f'<rect class="{_style(chunk, work)}" x="{x}" y="{top - 14}" width="{_SWATCH}" height="20"/>'
                yield f'<text class="middle" x="{x + _SWATCH // 2}" y="{top}">{work.value}</text>'
                x += _SWATCH
            yield f'<text x="{x + _LETTER}" y="{top}">{self._picture.stages_of(chunk)}</text>'

    def _letters(self) -> str:
        return ", ".join(f"{work.value} {WORDS[work]}" for work in self._picture.works)

    def _label(self, slot: Slot) -> str:
        return str(slot.action) if self._tells_stage else label(slot.action)

    def _x(self, time: float) -> str:
        return _pixels(_LEFT + time * self._scale)


def _style(chunk: int, work: Work) -> str:
    return f"{work.value}{chunk}"


def _pixels(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def html(picture: Picture) -> str:
    """The text of the file."""
    return filled(
        "schedule.html.j2",
        escaped=True,
        mark=MARK,
        title=picture.title,
        subtitle=picture.subtitle,
        works=[(work.value, WORDS[work]) for work in picture.works],
        chunks=[
            (picture.stages_of(chunk), [(work.value, f"#{colour(chunk, work)}") for work in picture.works])
            for chunk in range(picture.depth)
        ],
        drawn={
            "total": picture.timeline.total,
            "rows": _rows(picture),
            "words": {work.value: WORDS[work] for work in picture.works},
        },
    )


def _rows(picture: Picture) -> list[list[list[Any]]]:
    """Each rank's actions: label, colour, letter, stage, microbatch, start, end."""
    tells_stage = picture.depth > len(HUES)
    return [
        [
            [
                str(slot.action) if tells_stage else label(slot.action),
                f"#{colour(picture.chunks[slot.action.stage], slot.action.work)}",
                slot.action.work.value,
                slot.action.stage,
                slot.action.microbatch,
                slot.start,
                slot.end,
            ]
            for slot in row
        ]
        for row in picture.timeline.slots
    ]
