"""`scalec explain time`: its text, its options, and what can be wrong with them."""

import json
from pathlib import Path

import pytest

from scalec.compiler.cli import main

PLANS = Path(__file__).parents[2] / "plans"
LLAMA = str(PLANS / "llama3_70b.scale")


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    """What a command prints with `--json`."""
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "explain", "time", LLAMA)
    kinds, lines = found["kinds"], found["lines"]
    assert isinstance(kinds, dict)
    assert isinstance(lines, list)
    assert sum(kinds.values()) == pytest.approx(found["seconds"])
    for kind, seconds in kinds.items():
        assert sum(row["seconds"] for row in lines if row["kind"] == kind) == pytest.approx(seconds)


@pytest.mark.parametrize("words", [("memory", LLAMA), ("collectives", LLAMA), ("E0510",)])
def test_options_of_time_go_with_time(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *words, "--json"]) == 2
    assert "`--json` goes with `scalec explain time`" in capsys.readouterr().err
