"""Operations, seconds, MFU, and how long a training takes."""

from collections.abc import Mapping, Sequence

from attrs import evolve, frozen

from ...compiler.analysis.communication import active_count, parameter_count
from ...compiler.analysis.time import operations
from ...compiler.analysis.time.report import Report
from ...compiler.ir import MICROBATCHES, Program
from ...compiler.reports.time import accuracy_words, advice_note, advice_tables, seconds
from ..drawing import Canvas, text_width
from .subject import Subject

DAY = 86_400
WIDTH, ROW, BAR = 1080, 24.0, 16
ROOM_FOR_WORDS = 150
"""Pixels at the right of the longest bar."""

WHOLE = "a step"
LEAST = 0.0005
"""The least share of a step that has a bar."""


@frozen
class Speed:
    """How fast a plan trains.

    lead    the figures that a reader looks for first, as pairs of a name and a number in words
    facts   everything else, as such pairs
    kinds   the seconds of a step by kind, the longest first; none where speeds are not known
    seconds  of the step; 0 where speeds are not known
    source  where the seconds come from, a sentence
    advice  tables of faster plans, each a head and rows of cells; none where none were looked for
    advice_note  a sentence where none was found
    """

    lead: tuple[tuple[str, str], ...]
    facts: tuple[tuple[str, str], ...]
    kinds: tuple[tuple[str, float], ...]
    seconds: float
    source: str
    advice: tuple[Sequence[Sequence[str]], ...] = ()
    advice_note: str = ""


def speed(subject: Subject, tokens: float | None) -> Speed:
    """The speed of a plan; `tokens` to train on, by default the tokens of all its steps."""
    program, time = subject.program, subject.time
    train = program.train
    step = train.global_batch * train.seq
    total = tokens or float(step * train.steps)
    facts = _facts(program, step)
    if time is None:
        unknown = "seconds are not known: `cluster { gpu = … }` names no GPU with known speed"
        return Speed((), tuple(facts), (), 0.0, unknown)
    lead = (
        ("a step", seconds(time.step.seconds)),
        ("MFU", f"{time.mfu:.1%}"),
        ("tokens/s/GPU", f"{time.tokens:,.0f}"),
    )
    kinds = sorted(time.step.kinds.items(), key=lambda kind: -kind[1])
    visible_kinds = tuple(kind for kind in kinds if kind[1] > LEAST * time.step.seconds)
    source = f"on {time.ranks:,} × {time.on.name}, {accuracy_words(time.on)}"
    time_with_advice = evolve(time, neighbours=subject.neighbours)
    return Speed(
        lead=lead,
        facts=(*_training(time, total), *facts),
        kinds=visible_kinds,
        seconds=time.step.seconds,
        source=source,
        advice=tuple(advice_tables(time_with_advice)),
        advice_note=advice_note(time_with_advice),
    )


def _facts(program: Program, step: int) -> list[tuple[str, str]]:
    """Pairs of a name and a number that need no speeds; `step` is the tokens of a step."""
    facts = [("parameters", f"{parameter_count(program):,}")]
    if program.choices:
        facts.append(("active for a token", f"{active_count(program):,}"))
    return [
        *facts,
        ("tokens a step", f"{step:,}"),
        ("microbatches", f"{program.size(MICROBATCHES):,}"),
        ("operations of a token", scale_words(operations.needed(program) / step, OPERATIONS)),
        ("operations of a rank in a step", _operations(program)),
    ]


def _operations(program: Program) -> str:
    """For instance `7.4 PFLOP`, or `7.4 PFLOP needed, 9.8 PFLOP done` where backward recomputes."""
    needed = scale_words(operations.needed(program) / program.ranks, OPERATIONS)
    computed = scale_words(operations.done(program), OPERATIONS)
    if needed == computed:
        return needed
    return f"{needed} needed, {computed} done"


def _training(time: Report, total: float) -> list[tuple[str, str]]:
    """The time and the cost of a training on `total` tokens."""
    day = time.tokens * time.ranks * DAY
    return [
        ("HFU", f"{time.hfu:.1%}"),
        ("tokens a day", scale_words(day, TOKENS)),
        (f"for {scale_words(total, TOKENS)} tokens", day_words(total / day)),
        ("GPU hours", f"{total / day * 24 * time.ranks:,.0f}"),
    ]


def day_words(days: float) -> str:
    """For instance `12.3 days`, or `4.1 hours`."""
    return f"{days:,.1f} days" if days >= 2 else f"{days * 24:,.1f} hours"


OPERATIONS = {15: " PFLOP", 12: " TFLOP", 9: " GFLOP", 6: " MFLOP", 3: " kFLOP", 0: " FLOP"}
TOKENS = {12: " T", 9: " B", 6: " M", 3: " k", 0: ""}
"""Units by their power of ten."""


def scale_words(number: float, units: Mapping[int, str]) -> str:
    """For instance `15.0 T`."""
    power = next((power for power in units if number >= 10**power), 0)
    return f"{number / 10**power:,.1f}".removesuffix(".0") + units[power]


def drawing(speed: Speed) -> str:
    """A bar for the whole step, and below it one for each kind of time, all on one scale."""
    canvas = Canvas(WIDTH)
    total = speed.seconds
    names = [WHOLE, *(name for name, _ in speed.kinds)]
    left = max(map(text_width, names)) + 16
    scale = (WIDTH - left - ROOM_FOR_WORDS) / total
    canvas.words(0, 14, WHOLE, "head")
    canvas.words(left + total * scale + 8, 14, seconds(total), "head")
    end = left
    for row, (name, spent) in enumerate(speed.kinds, start=1):
        top, length, style = row * ROW + 2, max(spent * scale, 1), f"s{_series(name)}"
        canvas.box(end, 2, length, BAR, style, name)
        canvas.box(left, top, length, BAR, style)
        canvas.words(0, top + 12, name)
        words = f"{seconds(spent)}, {spent / total:.0%}"
        canvas.words(left + length + 8, top + 12, words, "muted")
        end += spent * scale
    return canvas.svg("seconds of a step, in all and by kind")


def _series(kind: str) -> int:
    if kind.startswith("exposed"):
        return 1
    return {"products": 0, "attention": 3, "memory-bound": 2}.get(kind, 7)
