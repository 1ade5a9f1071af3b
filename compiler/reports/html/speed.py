"""Operations, seconds, MFU, and how long a training takes."""

from collections.abc import Mapping

from attrs import frozen

from ...analysis.communication import active_count, parameter_count
from ...analysis.time import operations
from ...analysis.time.report import Report
from ...ir import MICROBATCHES
from ..drawing import Canvas, wide
from ..time import expected, seconds
from .subject import Subject

DAY = 86_400
LEAST = 0.0005
"""The least share of a step that has a bar."""


@frozen
class Speed:
    """Facts as pairs of a name and a number in words; `kinds` are the seconds of a step by kind, the longest first."""

    facts: tuple[tuple[str, str], ...]
    kinds: tuple[tuple[str, float], ...]
    source: str


def speed(of: Subject, tokens: float | None) -> Speed:
    """The speed of a plan; `tokens` to train on, by default those of all its steps."""
    program, time = of.program, of.time
    train = program.train
    step = train.global_batch * train.seq
    total = tokens or float(step * train.steps)
    facts = [
        ("parameters", f"{parameter_count(program):,}"),
        *([("active for a token", f"{active_count(program):,}")] if program.choices else []),
        ("tokens a step", f"{step:,}"),
        ("microbatches", f"{program.size(MICROBATCHES):,}"),
        ("a token needs", scaled(operations.needed(program) / step, OPERATIONS)),
        ("a step needs of a rank", scaled(operations.needed(program) / program.ranks, OPERATIONS)),
        ("a rank does in a step", scaled(operations.done(program), OPERATIONS)),
    ]
    if time is None:
        return Speed(tuple(facts), (), "seconds are not known: `cluster { gpu = … }` names no GPU with known speed")
    facts = [*_of_time(time, total), *facts]
    kinds = sorted(time.step.kinds.items(), key=lambda kind: -kind[1])
    source = f"on {time.ranks:,} × {time.on.name}, {expected(time.on)}"
    return Speed(tuple(facts), tuple(each for each in kinds if each[1] > LEAST * time.step.seconds), source)


def _of_time(time: Report, total: float) -> list[tuple[str, str]]:
    day = time.tokens * time.ranks * DAY
    return [
        ("a step", seconds(time.step.seconds)),
        ("tokens/s/GPU", f"{time.tokens:,.0f}"),
        ("MFU", f"{time.mfu:.1%}"),
        ("HFU", f"{time.hfu:.1%}"),
        ("tokens a day", scaled(day, TOKENS)),
        (f"for {scaled(total, TOKENS)} tokens", counted_days(total / day)),
        ("GPU hours", f"{total / day * 24 * time.ranks:,.0f}"),
    ]


def counted_days(days: float) -> str:
    """For instance `12.3 days`, or `4.1 hours`."""
    return f"{days:,.1f} days" if days >= 2 else f"{days * 24:,.1f} hours"


OPERATIONS = {15: " PFLOP", 12: " TFLOP", 9: " GFLOP", 6: " MFLOP", 3: " kFLOP", 0: " FLOP"}
TOKENS = {12: " T", 9: " B", 6: " M", 3: " k", 0: ""}
"""Units by their power of ten."""


def scaled(number: float, units: Mapping[int, str]) -> str:
    """For instance `15.0 T`."""
    power = next((power for power in units if number >= 10**power), 0)
    return f"{number / 10**power:,.1f}".removesuffix(".0") + units[power]


def drawing(it: Speed) -> str:
    """A bar for each kind of time."""
    canvas, total = Canvas(1080), sum(spent for _, spent in it.kinds)
    left = max(wide(name) for name, _ in it.kinds) + 16
    for at, (name, spent) in enumerate(it.kinds):
        y, part = at * 24.0, spent / total
        long = (1080 - left - 150) * spent / it.kinds[0][1]
        canvas.words(0, y + 14, name)
        canvas.box(left, y + 2, max(long, 1), 16, f"s{_series(name)}")
        canvas.words(left + long + 8, y + 14, f"{seconds(spent)}, {part:.0%}", "muted")
    return canvas.svg("seconds of a step by kind")


def _series(kind: str) -> int:
    if kind.startswith("exposed"):
        return 1
    return {"products": 0, "attention": 3, "memory-bound": 2}.get(kind, 7)
