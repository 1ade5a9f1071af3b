"""A schedule as a picture: SVG, or a page with a row for each rank, zoomed by wheel and dragged."""

from typing import Any

from ...syntax.package_data import filled
from ..drawing import Canvas
from .picture import MARK, WORDS, Picture, colour
from .rows import draw, fills, legend, lines, messages

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
    for said in table.splitlines():
        y += 15
        canvas.words(0, y, said, "pre")
    return canvas.file(picture.title, MARK, fills(picture))


def html(picture: Picture, table: str = "") -> str:
    """The text of the file, with a table, as `figures` makes it, below the rows."""
    return filled(
        "schedule.html.j2",
        escaped=True,
        mark=MARK,
        title=picture.title,
        subtitle=picture.subtitle,
        table=table,
        works=[(work.value, WORDS[work]) for work in picture.works],
        chunks=[
            (picture.stages_of(chunk), [(work.value, f"#{colour(chunk, work)}") for work in picture.works])
            for chunk in range(picture.depth)
        ],
        drawn={
            "total": picture.timeline.total,
            "rows": _rows(picture),
            "words": {work.value: WORDS[work] for work in picture.works},
            "messages": _messages(picture),
        },
    )


def _messages(picture: Picture) -> list[list[float]]:
    """Each message between ranks: from which rank and when, to which and when, for which microbatch."""
    owner = picture.schedule.stage_to_rank
    return [
        [owner[made.action.stage], made.end, owner[taken.action.stage], taken.start, made.action.microbatch]
        for made, taken in messages(picture)
    ]


def _rows(picture: Picture) -> list[list[list[Any]]]:
    """Each rank's actions: label, colour, letter, stage, microbatch, start, end."""
    return [
        [
            [
                str(slot.action),
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
