"""The warning that a pipeline's ranks wait for a large share of each step, with what would help.

Rows are timed as if all stages took equally long, as `scalec schedule --unit` does.
Non-goals: seconds (`analysis.time`).
"""

from collections.abc import Iterator

from ..config.units import count_words
from ..ir import MICROBATCHES, Pipeline, Program
from ..schedules.actions import Schedule, ScheduleError
from ..schedules.registry import SCHEDULES
from ..schedules.timeline import Times, simulate
from ..syntax.diagnostics import Diagnostic, Note

MOST = 1 / 3
"""The share of the step above which a warning is worth reading: 1F1B's with two microbatches a
rank.
"""

ENOUGH = 4
"""With this many microbatches for each rank, or more, the bubble is negligible, under a fifth
(GPipe, arXiv 1811.06965, 3.2).
"""

WORTH = 0.05
"""A schedule that shortens the wait by less of the step is not named."""

NAMED = (
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 4),
    ("zb_h1", 1),
    ("interleaved_zero_bubble", 2),
    ("zbv", 2),
    ("dualpipev", 2),
)
"""Schedules that are compared, and how many stages a rank has in each."""

SHOWN = 2
"""How many other schedules are named."""


def idle_pipeline(program: Program) -> Iterator[Diagnostic]:
    """The warning, if the ranks of a pipeline have few microbatches and wait long."""
    pipeline = program.pipeline
    if not pipeline or not pipeline.schedule:
        return
    ranks, microbatches = program.axis(pipeline.axis).size, program.size(MICROBATCHES)
    if microbatches >= ENOUGH * ranks:
        return
    now = bubble(pipeline.schedule)
    if now <= MOST:
        return
    message = (
        f"ranks of `{pipeline.axis}` wait {now:.0%} of the step: "
        f"{count_words(ranks, 'rank')} have only {count_words(microbatches, 'microbatch')}"
    )
    span = pipeline.settings.spans.get("schedule", program.axis(pipeline.axis).span)
    notes = (
        Note(None, "counted as if all stages took equally long; `scalec schedule --unit` draws it"),
    )
    help = "\n".join(
        (_more_microbatches(pipeline, ranks), *_other_schedules(program, pipeline, ranks, now))
    )
    yield Diagnostic("W0907", message, span, notes=notes, help=help)


def bubble(schedule: Schedule) -> float:
    """The share of all ranks' time that they wait, if all stages take equally long."""
    return simulate(schedule, Times.uniform(schedule.stages)).bubble


def _more_microbatches(pipeline: Pipeline, ranks: int) -> str:
    """How many microbatches would be enough; and the bubble then, if the rows have the name of a
    schedule.
    """
    ways = "a larger `global_batch`, a smaller `microbatch` or fewer ranks of data"
    more = f"make at least {ENOUGH * ranks:,} microbatches, by {ways}"
    settings = pipeline.settings.schedule
    left = _bubble_of(settings.kind, ranks, ENOUGH * ranks, settings.chunks)
    if left is None:
        return more
    return f"{more}: {left:.0%}"


def _other_schedules(program: Program, pipeline: Pipeline, ranks: int, now: float) -> Iterator[str]:
    """Named schedules that shorten the wait most, the best first; none where the plan writes its
    stages itself.
    """
    if pipeline.settings.stages:
        return
    layers, microbatches = sum(map(program.size, pipeline.dims)), program.size(MICROBATCHES)
    bubbles = list[tuple[float, str]]()
    for kind, chunks in NAMED:
        if ranks * chunks > layers:
            continue  # a stage would have no layer
        left = _bubble_of(kind, ranks, microbatches, chunks)
        if left is not None and left <= now - WORTH:
            schedule = kind
            if SCHEDULES[kind].variable:
                schedule = f"{kind}(chunks={chunks})"
            bubbles.append((left, schedule))
    for left, schedule in sorted(bubbles)[:SHOWN]:
        yield (
            f"or write `schedule = {schedule}`: {left:.0%};"
            " `scalec explain memory` says what it needs"
        )


def _bubble_of(kind: str, ranks: int, microbatches: int, chunks: int | None) -> float | None:
    """The bubble of a named schedule; None where it has no rows for these numbers."""
    spec = SCHEDULES.get(kind)
    if spec is None:
        return None
    try:
        return bubble(spec(ranks, microbatches, chunks))
    except ScheduleError:
        return None
