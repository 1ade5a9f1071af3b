"""An option of the command line has an effect, or the run says that it has none, and why."""

from dataclasses import replace

import pytest

from helpers.bigram import PLAN
from scalec.runtime.data.corpus import DataSet
from scalec.runtime.train.ignored_options import (
    Situation,
    find_ignored_by_export,
    find_ignored_options,
)
from scalec.runtime.train.options import parse

ALONE = replace(PLAN, mesh={"dp": 1})
SETS = replace(PLAN, data=replace(PLAN.data, sets=(DataSet("a", ("a",)), DataSet("b", ("b",)))))


def get_ignored_options(
    line: str, plan: object = PLAN, validates: bool = True, resumed_from: str = ""
) -> list[str]:
    assert isinstance(plan, type(PLAN))
    situation = Situation(parse(plan, line.split()), plan, validates, resumed_from)
    return [*find_ignored_options(situation)]


ALL = (
    "--eval-every 1 --init in --first-step-limit 9 --step-limit 9 --save-limit=9 --keep-every"
    " 4 --save-every 2"
)


def test_options_that_have_an_effect_are_not_said() -> None:
    assert get_ignored_options(ALL) == []
    assert get_ignored_options("", ALONE, validates=False, resumed_from="step-000002") == [], (
        "what nobody has asked for"
    )


@pytest.mark.parametrize(
    ("option", "plan", "validates", "resumed_from", "why"),
    [
        ("--eval-every", PLAN, False, "", "no data is held out for validation"),
        ("--init", PLAN, True, "runs/a/step-000002", "the run goes on from runs/a/step-000002"),
        ("--first-step-limit", ALONE, True, "", "a single rank waits for no other"),
        ("--step-limit", ALONE, True, "", "a single rank waits for no other"),
        ("--save-limit", ALONE, True, "", "a single rank waits for no other"),
    ],
)
def test_an_option_without_effect_is_said(
    option: str, plan: object, validates: bool, resumed_from: str, why: str
) -> None:
    lines = get_ignored_options(ALL, plan, validates, resumed_from)
    assert any(line.startswith(f"warning: {option} has no effect: {why}") for line in lines)
    assert len(lines) == (3 if plan is ALONE else 1)


@pytest.mark.parametrize(
    ("line", "is_said"),
    [
        ("--keep-every 3 --save-every 2 --steps 5", True),
        ("--keep-every 3 --save-every 2 --steps 6", False),
        ("--keep-every 5 --save-every 2 --steps 5", False),
        ("--keep-every 0 --save-every 2 --steps 5", False),
    ],
)
def test_saves_to_keep_are_after_some_step(line: str, is_said: bool) -> None:
    assert bool(get_ignored_options(line)) == is_said


def test_files_in_place_of_sets_are_said() -> None:
    (line,) = get_ignored_options("--data text/*.txt", SETS)
    assert (
        line
        == "note: the files of --data take the place of all sets of the plan (a, b) and of their"
        " weights"
    )
    assert get_ignored_options("--data text/*.txt") == []


def test_an_export_trains_nothing() -> None:
    line = "--export out --export-dtype fp32 --out runs --steps 9 --lr=1 --resume"
    options = parse(PLAN, [*line.split()])
    assert [line.split()[1] for line in find_ignored_by_export(options)] == [
        "--lr",
        "--resume",
        "--steps",
    ]
