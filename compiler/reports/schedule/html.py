"""A schedule as a page by itself: a row for each rank, zoomed by wheel and dragged, with words where the pointer is.

Purpose: fills `codegen_templates/schedule.html.j2`.  Non-goals: what the page does (the template).
"""

from typing import Any

from ...syntax.package_data import filled
from .colours import HUES, colour
from .picture import MARK, WORDS, Picture, label


def html(picture: Picture) -> str:
    """The text of the file."""
    return filled(
        "schedule.html.j2",
        escaped=True,
        mark=MARK,
        title=picture.title,
        subtitle=picture.subtitle,
        works=[(work.value, WORDS[work]) for work in picture.works],
        chunks=[(picture.stages_of(chunk), _colours(picture, chunk)) for chunk in range(picture.depth)],
        drawn={"total": picture.timeline.total, "rows": _rows(picture), "words": _words(picture)},
    )


def _colours(picture: Picture, chunk: int) -> list[tuple[str, str]]:
    return [(work.value, f"#{colour(chunk, work)}") for work in picture.works]


def _rows(picture: Picture) -> list[list[list[Any]]]:
    """Of each rank's actions: label, colour, letter, stage, microbatch, start, end."""
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


def _words(picture: Picture) -> dict[str, str]:
    return {work.value: WORDS[work] for work in picture.works}
