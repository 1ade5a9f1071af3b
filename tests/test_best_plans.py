"""Plans that scalec ships fit the cluster that they name, and no change of one setting makes them
much faster.

A plan that is not the fastest, or does not fit, says in a comment why: `# … Not the fastest: …`, `#
… Does not fit: …`.
"""

from pathlib import Path

import pytest

from scalec.compiler.analysis.hardware import hardware
from scalec.compiler.analysis.memory import account, capacity, need_range
from scalec.compiler.analysis.time.report import report
from scalec.compiler.frontend import resolve
from scalec.compiler.syntax.limits import load
from scalec.compiler.tuning.advice import make_report_with_advice
from scalec.compiler.tuning.lowering import lower

PLANS = sorted((Path(__file__).parents[1] / "plans").glob("*.scale"))
NAMED = [path for path in PLANS if "gpu = " in path.read_text(encoding="utf-8")]
"""Plans that name a GPU; the others are for processes on any machine."""

SLOWER, LARGER = "Not the fastest: ", "Does not fit: "
WORTH = 0.03
"""The part of a step by which the best advice may make it shorter."""


def comment(path: Path) -> str:
    """The words of a plan's comments."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return " ".join(line.removeprefix("# ") for line in lines if line.startswith("#"))


def is_excused(path: Path, words: str) -> bool:
    """Whether a plan's comment gives a reason after these words."""
    _, found, reason = comment(path).partition(words)
    return bool(found) and len(reason) > 40


def test_plans_without_a_gpu_are_the_tiny_ones() -> None:
    assert {path.stem.split("_")[0] for path in PLANS if path not in NAMED} == {"tiny"}


@pytest.mark.parametrize("path", NAMED, ids=lambda path: path.stem)
def test_a_shipped_plan_fits_its_gpu(path: Path) -> None:
    """All of the range of its memory, with experts at the load for which it has room."""
    program = lower(resolve(load(path)))
    fits = need_range(program, account(program)).fits(capacity(program))
    assert fits is (not is_excused(path, LARGER))


UNEXCUSED = [path for path in NAMED if not (is_excused(path, SLOWER) or is_excused(path, LARGER))]


@pytest.mark.sample(1)
@pytest.mark.parametrize("path", UNEXCUSED, ids=lambda path: path.stem)
def test_no_advice_makes_a_shipped_plan_much_faster(path: Path) -> None:
    """Of the plans with one setting changed that `explain time` prices and that fit."""
    source = load(path)
    model = resolve(source)
    program = lower(model)
    on = hardware(program)
    assert on, "its GPU has no rates"
    found = make_report_with_advice(report(program, on, by_load=False), model, source)
    gains = {
        other.words: f"{1 - other.seconds / found.step.seconds:.1%}"
        for other in found.neighbours or ()
        if other.room.fits
        and not other.room.close_to_full
        and other.seconds < (1 - WORTH) * found.step.seconds
    }
    assert not gains


@pytest.mark.parametrize(
    "path", [path for path in NAMED if is_excused(path, SLOWER)], ids=lambda path: path.stem
)
def test_a_plan_that_is_not_the_fastest_names_a_faster_one(path: Path) -> None:
    """A command that finds it, or a plan that has it."""
    reason = comment(path).partition(SLOWER)[2]
    assert "`scalec plan" in reason
