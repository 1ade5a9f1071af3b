"""Options on the command line that a run cannot follow: for each a row with the condition and the
reason.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import lcm

from ..config.plan import Plan
from .options import Options

_OF_EXPORT = ("--export", "--export-dtype", "--out", "--device")


@dataclass(frozen=True)
class Situation:
    """A run that is about to begin: its options and plan, whether it validates, and the
    checkpoint it goes on from.
    """

    options: Options
    plan: Plan
    validates: bool
    resumed_from: str


@dataclass(frozen=True)
class Row:
    """An option, and why a run ignores it; "" where it does not."""

    option: str
    why: Callable[[Situation], str]


def find_ignored_options(situation: Situation) -> Iterator[str]:
    """A line for each option that is on the command line and has no effect in this run."""
    options = situation.options.given
    for row in ROWS:
        if row.option in options and (why := row.why(situation)):
            yield f"warning: {row.option} has no effect: {why}"
    sets = situation.plan.data.sets
    if "--data" in options and sets:
        names = ", ".join(data_set.name for data_set in sets)
        yield (
            f"note: the files of --data take the place of all sets of the plan ({names}) and"
            " of their weights"
        )


def find_ignored_by_export(options: Options) -> Iterator[str]:
    """A line for each option that concerns training: an export trains nothing."""
    for option in options.given:
        if option not in _OF_EXPORT:
            yield (
                f"warning: {option} has no effect: --export writes a checkpoint's weights and"
                " trains nothing"
            )


def _eval_every(situation: Situation) -> str:
    if situation.validates:
        return ""
    return "no data is held out for validation; `holdout = 5%` in the plan's `data` does that"


def _init(situation: Situation) -> str:
    if not situation.resumed_from:
        return ""
    return f"the run goes on from {situation.resumed_from}"


def _limit(situation: Situation) -> str:
    if situation.plan.ranks > 1:
        return ""
    return "a single rank waits for no other"


def _keep_every(situation: Situation) -> str:
    options = situation.options
    every = options.keep_every
    if not every or options.steps % every == 0 or lcm(options.save_every, every) <= options.steps:
        return ""
    return (
        f"no save is after a step that {every:,} divides: saves are after each"
        f" {options.save_every:,} steps"
    )


ROWS = (
    Row("--eval-every", _eval_every),
    Row("--init", _init),
    Row("--first-step-limit", _limit),
    Row("--step-limit", _limit),
    Row("--save-limit", _limit),
    Row("--keep-every", _keep_every),
)
