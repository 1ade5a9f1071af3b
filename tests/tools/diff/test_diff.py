"""`scalec diff`: two plans side by side."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from scalec.compiler.cli import main
from scalec.tools.diff.differences import SECTIONS, Row, rows

PLANS = Path(__file__).parents[3] / "plans"
LLAMA, PIPELINE = str(PLANS / "tiny_llama.scale"), str(PLANS / "tiny_pipeline.scale")


@pytest.mark.parametrize(("name", "words"), [("different", ()), ("all", ("--all",))])
def test_people_are_told(
    name: str,
    words: tuple[str, ...],
    golden: Callable[[str, str], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without a known GPU there are no seconds."""
    assert main(["diff", LLAMA, PIPELINE, *words]) == 1
    golden(f"diff/{name}.txt", capsys.readouterr().out)


def test_a_plan_does_not_differ_from_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", LLAMA, LLAMA]) == 0
    assert capsys.readouterr().out.endswith("\n\nno difference\n")
    assert main(["diff", LLAMA, LLAMA, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {}


def test_a_compiled_folder_is_the_plan_that_it_was_compiled_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    assert main(["compile", LLAMA, "-o", str(folder), "--no-verify"]) == 0
    capsys.readouterr()
    for pair, status in (
        ((LLAMA, str(folder)), 0),
        ((str(folder), PIPELINE), 1),
        ((LLAMA, str(tmp_path)), 1),
    ):
        assert main(["diff", *pair]) == status
    assert f"`{tmp_path}/plan.json`" in capsys.readouterr().err


def test_json_has_the_figures_of_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seconds are those that each plan's own report has; a factored axis is named as the plan
    names it.
    """
    first, second = PLANS / "llama3_70b.scale", tmp_path / "second.scale"
    second.write_text(
        f'use "{first}" {{ mesh {{ dp = 32  tp = 16 }}  cluster {{ gpus_per_node = 16  nodes ='
        f" 32 }} }}"
    )
    assert main(["diff", str(first), str(second), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert set(found) <= set(SECTIONS)
    for at, path in enumerate((first, second)):
        main(["explain", "time", "--no-advice", "--json", str(path)])
        own = json.loads(capsys.readouterr().out)
        assert found["seconds"]["step"][at] == own["seconds"]
        assert found["rates"]["MFU"][at] == own["mfu"]
        assert found["memory"]["needs"][at] == own["memory"]["needs"]
    assert found["plan"]["ranks of tp"] == [4, 16]
    assert "ranks" not in found["plan"]
    assert "parameters" in found
    assert "wq" not in found["parameters"]
    assert found["parameters"]["wk"][0].endswith(
        "[layers, kv_heads@tp, head_dim, hidden], state over dp"
    )


def test_only_what_both_have_is_compared_of_values_and_rates() -> None:
    first = {
        "values": {"x": "f32[a]", "y": "f32[a]"},
        "memory": {"state": 1},
        "seconds": {"step": 1.0},
    }
    second = {"values": {"x": "f32[b]"}, "memory": {"state": 1, "unsharded": 2}}
    assert [*rows(first, second)] == [
        Row("values", "x", "f32[a]", "f32[b]"),
        Row("memory", "state", 1, 1),
        Row("memory", "unsharded", None, 2),
    ]


@pytest.mark.parametrize(
    ("row", "cells"),
    [
        (Row("memory", "state", 2**20, 3 * 2**20), ("state", "1.0 MiB", "3.0 MiB", "+200.0%")),
        (Row("calls", "all_gather over dp", 2, 82), ("all_gather over dp", "2", "82", "×41")),
        (
            Row("calls", "all_gather over dp", 2, 2000),
            ("all_gather over dp", "2", "2,000", "×1,000"),
        ),
        (Row("calls", "all_gather over dp", 2, 2002), ("all_gather over dp", "2", "2,002", "")),
        (Row("rates", "MFU", 0.4, 0.3), ("MFU", "40.0%", "30.0%", "-25.0%")),
        (Row("seconds", "bubble", None, 0.5), ("bubble", "", "500.0 ms", "")),
        (Row("parameters", "wq", "f32[a]", "f32[b]"), ("wq", "f32[a]", "f32[b]", "")),
    ],
)
def test_figures_are_written_with_their_change(row: Row, cells: tuple[str, ...]) -> None:
    assert row.cells() == cells


def test_shares_of_a_mixture_are_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = [tmp_path / f"{weight}.scale" for weight in (3, 1)]
    for plan in plans:
        sets = f'set code {{ files = ["a"]  weight = {plan.stem} }}  set wiki {{ files = ["b"] }}'
        text = (PLANS / "tiny_llama.scale").read_text().replace('"models/', f'"{PLANS}/models/')
        plan.write_text(text.replace("files = [python_stdlib]", sets))
    assert main(["diff", *map(str, plans)]) == 1
    plan_rows = [
        line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("share")
    ]
    assert plan_rows == [
        ["share", "of", "code", "75.0%", "50.0%", "-33.3%"],
        ["share", "of", "wiki", "25.0%", "50.0%", "+100.0%"],
    ]


def test_two_plans_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["diff", LLAMA])
    assert "the following arguments are required: PLAN" in capsys.readouterr().err
