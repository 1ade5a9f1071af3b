"""The pipeline of a plan: its rows in time, in seconds where these are known, and what each
rank does and holds.
"""

from collections.abc import Callable

from attrs import frozen

from ...analysis.memory import accounts
from ...analysis.stage_schedule import estimated
from ...analysis.time.pipeline import Rows
from ..drawing import Canvas
from ..schedule.figures import ranks_table
from ..schedule.picture import Picture, number, of_plan, share
from ..schedule.rows import draw, excerpt, fills, legend
from ..time import seconds
from .subject import Subject

WIDTH = 1080


@frozen
class Pipeline:
    """The rows, their times as they are written, and a table: its head, then a row for each rank.

    seconds  of the step, with what is before and after the rows; None where they are not known
    """

    picture: Picture
    seconds: float | None
    said: Callable[[float], str]
    summary: str
    table: tuple[tuple[str, ...], ...]

    @property
    def fills(self) -> dict[str, str]:
        """Colours of classes of actions."""
        return fills(self.picture)


def pipeline(of: Subject) -> Pipeline | None:
    """The pipeline of a plan, if it has one."""
    program, on = of.program, of.hardware
    if not (pipeline := program.pipeline):
        return None
    rows = Rows(program, pipeline, on) if on else None
    picture = of_plan(program, rows.times if rows else estimated(program, pipeline).rounded())
    said = seconds if rows else number
    unit = "" if on else " times the most expensive forward, estimated from operations"
    summary = (
        f"the rows take {said(picture.timeline.total)}{unit}; bubble"
        f" {share(picture.timeline.bubble)} of ranks' time"
    )
    return Pipeline(
        picture,
        rows.seconds if rows else None,
        said,
        summary,
        tuple(ranks_table(picture, accounts(program), said)),
    )


def drawings(it: Pipeline) -> list[str]:
    """Each line of the rows, or the beginning and the end; the last has the legend."""
    found: list[str] = []
    lines = excerpt(it.picture, WIDTH)
    for at, line in enumerate(lines):
        canvas = Canvas(WIDTH)
        foot = draw(canvas, it.picture, line, 6.0, it.said)
        if at == len(lines) - 1:
            legend(canvas, it.picture, foot)
        found.append(canvas.svg(f"the pipeline's rows, {line.name or 'with messages'}"))
    return found
