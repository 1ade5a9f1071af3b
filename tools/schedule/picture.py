"""A schedule with all that its pictures show, and the colours of its actions."""

from collections.abc import Iterator, Sequence
from itertools import chain, count, takewhile
from math import floor, log10

from attrs import frozen

from ...compiler.config.units import count_words
from ...compiler.ir import Program
from ...compiler.schedules.actions import Action, Row, Schedule, Work
from ...compiler.schedules.timeline import Slot, Timeline, Times, simulate

HUES = (  # forward, backward or its input part, weight part
    ("87afff", "5f87d7", "d7d7ff"),
    ("ffaf5f", "d7875f", "ffd7af"),
    ("87d787", "5faf5f", "d7ffd7"),
    ("ff87d7", "d75faf", "ffd7ff"),
    ("5fd7d7", "5fafaf", "d7ffff"),
    ("ffd75f", "d7af5f", "ffffaf"),
)
"""All of the 216 colours that terminals have."""

_SHADES = {Work.FORWARD: 0, Work.BACKWARD: 1, Work.INPUT: 1, Work.WEIGHT: 2}


def colour(chunk: int, work: Work) -> str:
    """Six hexadecimal digits."""
    return HUES[chunk % len(HUES)][_SHADES[work]]


def terminal_colour(chunk: int, work: Work) -> int:
    """Its number in a terminal's palette of 256, whose cube begins at 16 with levels 00, 5f,
    87, af, d7, ff.
    """
    red, green, blue = (max(0, (level - 35) // 40) for level in bytes.fromhex(colour(chunk, work)))
    return 16 + 36 * red + 6 * green + blue


MARK = "Written by scalec schedule"
"""A mark in the opening lines of every file that has room for it."""

_UNLIKE = 50
"""How many times as long as an action another may be, for both to have labels."""

WORDS = {
    Work.FORWARD: "forward",
    Work.BACKWARD: "backward",
    Work.INPUT: "input gradients",
    Work.WEIGHT: "weight gradients",
}
"""The meaning of the letters."""


@frozen
class Picture:
    """A schedule, without messages, and when its actions happen."""

    title: str
    kind: str
    """The schedule's name."""
    schedule: Schedule
    times: Times
    timeline: Timeline
    chunks: tuple[int, ...]
    """The place of each stage among those of its rank."""
    unit: str
    """The unit of times, in words; empty where it is whatever a user means by `--times`."""

    @property
    def depth(self) -> int:
        """The largest number of stages on a rank."""
        return max(self.chunks) + 1

    @property
    def works(self) -> tuple[Work, ...]:
        """The kinds of work that occur, in the order of `WORDS`."""
        actions = chain.from_iterable(self.schedule.rows)
        works = {action.work for action in actions}
        return tuple(work for work in WORDS if work in works)

    @property
    def slots(self) -> Iterator[Slot]:
        """All actions in time, rank by rank."""
        return chain.from_iterable(self.timeline.slots)

    @property
    def shortest(self) -> float:
        """How long the shortest action takes that a drawing to scale has room to label."""
        durations = [slot.end - slot.start for slot in self.slots]
        longest = max(durations)
        return min(time for time in durations if time * _UNLIKE >= longest)

    @property
    def subtitle(self) -> str:
        """The times of a microbatch on a stage, and what they come to."""
        total, bubble = number(self.timeline.total), share(self.timeline.bubble)
        return f"{_times(self.times)}; {total} in all, bubble {bubble} of ranks' time"

    def stages_of(self, chunk: int) -> str:
        """The stages of a chunk on all ranks, for instance `stages 4–7`."""
        stages = [stage for stage, chunk_of in enumerate(self.chunks) if chunk_of == chunk]
        first, last = stages[0], stages[-1]
        if len(stages) == 1:
            return f"stage {first}"
        if last - first + 1 == len(stages):
            return f"stages {first}–{last}"
        return f"stages {', '.join(map(str, stages))}"


def picture(title: str, kind: str, schedule: Schedule, times: Times, unit: str = "") -> Picture:
    """The picture of a schedule, with messages or without."""
    rows: list[Row] = []
    for row in schedule.rows:
        rows.append(tuple(action for action in row if not action.work.is_message))
    bare = Schedule(schedule.stage_to_rank, schedule.microbatches, tuple(rows))
    chunks: list[int] = []
    for stage, rank in enumerate(schedule.stage_to_rank):
        chunks.append(schedule.stages_of(rank).index(stage))
    return Picture(title, kind, bare, times, simulate(bare, times), tuple(chunks), unit)


def of_plan(program: Program, times: Times, unit: str = "") -> Picture:
    """The picture of the rows of a plan with a pipeline."""
    pipeline = program.pipeline
    assert pipeline, "schedule: no pipeline"
    assert pipeline.schedule, "schedule: no rows"
    schedule, kind = pipeline.schedule, pipeline.settings.schedule.kind
    stages = count_words(schedule.stages, "stage")
    ranks = f"{count_words(schedule.ranks, 'rank')} of {pipeline.axis}"
    title = (
        f"{program.name}: {kind}, {stages} on {ranks},"
        f" {count_words(schedule.microbatches, 'microbatch')}"
    )
    return picture(title, kind, schedule, times, unit)


def label(action: Action) -> str:
    """An action where its stage is told by other means, for instance `F12`."""
    return f"{action.work.value}{action.microbatch}"


def number(value: float) -> str:
    """A time, rounded to nine digits: sums of floats are not exact."""
    return f"{value:.9g}"


def share(value: float) -> str:
    """A part of the whole, for instance `27.3%`."""
    return f"{value:.1%}"


def ticks(until: float, apart: float) -> Iterator[float]:
    """The times to write on an axis: round ones, at least `apart`."""
    power = 10 ** floor(log10(apart))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= apart)
    return takewhile(lambda time: time <= until, (number * step for number in count()))


def _times(times: Times) -> str:
    """For instance `forward 1, input gradients 0.9–1.1, weight gradients 1, messages 0`."""
    times_of_stages = {
        WORDS[Work.FORWARD]: times.forward,
        WORDS[Work.INPUT]: times.input,
        WORDS[Work.WEIGHT]: times.weight,
        "messages": (times.send,),
    }
    return ", ".join(f"{name} {_range(values)}" for name, values in times_of_stages.items())


def _range(values: Sequence[float]) -> str:
    """The least and the most of some numbers, once where they are the same."""
    least, most = number(min(values)), number(max(values))
    return least if least == most else f"{least}–{most}"
