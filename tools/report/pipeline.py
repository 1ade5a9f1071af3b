"""The pipeline of a plan: its rows in time, in seconds where these are known, and a table of the
work and the memory of each rank.
"""

from collections.abc import Callable

from attrs import frozen

from ...compiler.analysis.memory import accounts
from ...compiler.analysis.stage_schedule import estimate_times
from ...compiler.analysis.time.pipeline import Rows
from ...compiler.reports.time import seconds
from ..drawing import Canvas
from ..schedule.figures import ranks_table
from ..schedule.picture import Picture, number, of_plan, share
from ..schedule.rows import draw, excerpt, fills, legend
from .subject import Subject

WIDTH = 1080


@frozen
class Pipeline:
    """The rows, the function that writes their times, and a table: its head, then a row for each
    rank.

    seconds  of the whole step, not of its rows alone; None where they are not known
    """

    picture: Picture
    seconds: float | None
    write_time: Callable[[float], str]
    summary: str
    table: tuple[tuple[str, ...], ...]

    @property
    def fills(self) -> dict[str, str]:
        """Colours of classes of actions."""
        return fills(self.picture)


def pipeline(subject: Subject) -> Pipeline | None:
    """The pipeline of a plan, if it has one."""
    program, on = subject.program, subject.hardware
    if not (pipeline := program.pipeline):
        return None
    if on:
        rows = Rows(program, pipeline, on)
        times, total_seconds, write, unit = rows.times, rows.seconds, seconds, ""
    else:
        times, total_seconds, write = estimate_times(program, pipeline).round_times(), None, number
        unit = " times the most expensive forward, estimated from operations"
    picture = of_plan(program, times)
    summary = (
        f"the rows take {write(picture.timeline.total)}{unit}; bubble"
        f" {share(picture.timeline.bubble)} of ranks' time"
    )
    table = tuple(ranks_table(picture, accounts(program), write))
    return Pipeline(picture, total_seconds, write, summary, table)


def drawings(pipeline: Pipeline) -> list[str]:
    """The pictures of all lines of the rows, or of the beginning and the end; the last has the
    legend.
    """
    pictures: list[str] = []
    lines = excerpt(pipeline.picture, WIDTH)
    for line in lines:
        canvas = Canvas(WIDTH)
        foot = draw(canvas, pipeline.picture, line, 6.0, pipeline.write_time)
        if line is lines[-1]:
            legend(canvas, pipeline.picture, foot)
        pictures.append(canvas.svg(f"the pipeline's rows, {line.name or 'with messages'}"))
    return pictures
