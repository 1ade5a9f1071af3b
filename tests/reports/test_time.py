"""`scalec explain time`: its text, its options, and what can be wrong with them."""

import json
from pathlib import Path
from typing import Any

import pytest

from scalec.compiler.cli import main

PLANS = Path(__file__).parents[2] / "plans"
LLAMA = str(PLANS / "llama3_70b.scale")


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What a command prints with `--json`."""
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "explain", "time", LLAMA)
    kinds, lines = found["kinds"], found["lines"]
    assert sum(kinds.values()) == pytest.approx(found["seconds"])
    for kind, seconds in kinds.items():
        assert sum(row["seconds"] for row in lines if row["kind"] == kind) == pytest.approx(seconds)


@pytest.mark.parametrize("option", ["--json", "--no-advice"])
@pytest.mark.parametrize("words", [("memory", LLAMA), ("collectives", LLAMA), ("E0510",)])
def test_options_of_time_go_with_time(words: tuple[str, ...], option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *words, option]) == 2
    assert f"`{option}` goes with `scalec explain time`" in capsys.readouterr().err


@pytest.mark.parametrize("plan", ["gpt2_124m", "mixtral_8x7b"])
def test_neighbours_are_as_their_own_report_says(plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = PLANS / f"{plan}.scale"
    found = as_json(capsys, "explain", "time", str(path))
    assert found["neighbours"]
    for each in found["neighbours"]:
        changed = tmp_path / "changed.scale"
        changed.write_text(f'use "{path}" {{ {each["section"]} {{ {each["content"]} }} }}')
        own = as_json(capsys, "explain", "time", "--no-advice", str(changed))
        assert own["seconds"] == each["seconds"]
        assert own["memory"] == each["memory"]
        assert 1 - own["seconds"] / found["seconds"] == pytest.approx(each["gain"])


def test_faster_plans_are_named_with_their_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "time", LLAMA]) == 0
    shown = capsys.readouterr().out
    _, fits, large, _ = shown.rsplit("\n\n", 3)
    assert fits.startswith("would help")
    assert "train { microbatch = 2 }" in fits
    assert large.startswith("too large")
    assert "train { recompute = none }" in large
    assert "GiB too many" in large
    main(["explain", "time", "--no-advice", LLAMA])
    assert capsys.readouterr().out == shown.replace(f"\n\n{fits}\n\n{large}", "")


def test_a_plan_that_does_not_fit_is_told_which_do(capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain", "time", str(PLANS / "llama3_405b.scale")])
    shown = capsys.readouterr().out
    assert "does not fit: a rank needs" in shown
    assert "none of the plans with one setting changed fits" in shown


def test_memory_that_is_close_to_full_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.scale"
    plan.write_text(f'use "{LLAMA}" {{ cluster {{ memory = 60GiB }} }}')
    main(["explain", "time", "--no-advice", str(plan)])
    assert "close to full: time cannot be told; a rank needs" in capsys.readouterr().out
