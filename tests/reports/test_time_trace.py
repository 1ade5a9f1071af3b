"""`scalec explain time --trace` and `--critical`: the predicted step as a trace, and its
critical path.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from scalec.compiler.cli import main
from scalec.compiler.cli.explain import load_recorded_steps
from scalec.compiler.cli.output import UsageError

PLANS = Path(__file__).parents[2] / "plans"


def traced(plan: str, path: Path) -> list[dict[str, Any]]:
    assert main(["explain", "time", str(PLANS / plan), "--no-advice", "--trace", str(path)]) == 0
    return json.loads(path.read_text())["traceEvents"]


def tracks(events: list[dict[str, Any]], pid: int) -> list[str]:
    return [it["args"]["name"] for it in events if it["name"] == "thread_name" and it["pid"] == pid]


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", ["llama3_70b.scale", "mixtral_8x7b.scale"])
def test_the_gpu_is_busy_or_waits_until_the_step_is_over(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = traced(plan, tmp_path / "trace.json")
    capsys.readouterr()
    assert main(["explain", "time", str(PLANS / plan), "--no-advice", "--json"]) == 0
    seconds = json.loads(capsys.readouterr().out)["seconds"]
    for pid in {it["pid"] for it in events}:
        gpu = tracks(events, pid).index("gpu")
        spans = [it for it in events if it["ph"] == "X" and (it["pid"], it["tid"]) == (pid, gpu)]
        assert sum(it["dur"] for it in spans) == pytest.approx(seconds * 1e6, rel=1e-4)
        assert max(it["ts"] + it["dur"] for it in spans) == pytest.approx(seconds * 1e6, rel=1e-6)


def test_ranks_of_a_pipeline_are_processes_and_streams_are_tracks(tmp_path: Path) -> None:
    events = traced("mixtral_8x7b.scale", tmp_path / "trace.json")
    names = [it["args"]["name"] for it in events if it["name"] == "process_name"]
    assert names == ["predicted: pp 0", "predicted: pp 1"]
    assert tracks(events, 1) == ["actions", "gpu", "dp", "dp × ep", "ep", "pp × dp × ep", "host"]
    lines = {it["args"]["line"] for it in events if it["ph"] == "X"}
    assert "mixtral.scale:29" in lines  # as a recorded trace has it


RECORDED = {
    "traceEvents": [
        {"ph": "M", "pid": 7, "name": "process_name", "ts": 0, "args": {"name": "python"}},
        {"ph": "M", "pid": 7, "tid": 1, "name": "thread_name", "ts": 0, "args": {"name": "main"}},
        {"ph": "X", "cat": "cpu_op", "pid": 7, "tid": 1, "name": "early", "ts": 150.0, "dur": 9.0},
        {
            "ph": "X",
            "cat": "user_annotation",
            "pid": 7,
            "tid": 1,
            "name": "step 3",
            "ts": 100.0,
            "dur": 90.0,
        },
        {
            "ph": "X",
            "cat": "user_annotation",
            "pid": 7,
            "tid": 1,
            "name": "step 4",
            "ts": 200.0,
            "dur": 90.0,
        },
        {
            "ph": "X",
            "cat": "kernel",
            "pid": 0,
            "tid": 2,
            "name": "gemm",
            "ts": 220.5,
            "dur": 9.0,
            "args": {},
        },
    ]
}


def test_a_recorded_step_lies_beside_the_predicted_one(tmp_path: Path) -> None:
    (tmp_path / "rank00001.json").write_text(json.dumps(RECORDED))
    found = load_recorded_steps(tmp_path)
    assert [it["name"] for it in found] == ["process_name", "thread_name", "step 4", "gemm"]
    assert found[0]["args"]["name"] == "recorded: rank 1, python"
    assert [it["ts"] for it in found[2:]] == [0.0, 20.5]
    assert {it["pid"] for it in found} == {2000, 2001}
    (tmp_path / "rank00002.json").write_text("[]")
    with pytest.raises(UsageError, match="is no trace"):
        load_recorded_steps(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="has no trace"):
        load_recorded_steps(tmp_path / "empty")


@pytest.mark.long
def test_only_traces_are_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    traced("llama3_70b.scale", path)
    traced("llama3_70b.scale", path)
    path.write_text("mine")
    assert (
        main(
            [
                "explain",
                "time",
                str(PLANS / "llama3_70b.scale"),
                "--no-advice",
                "--trace",
                str(path),
            ]
        )
        == 2
    )
    assert "was not written by scalec" in capsys.readouterr().err
    assert path.read_text() == "mine"


def test_the_critical_path_has_the_lines_that_make_the_step_long(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of 405 billion parameters that 2,048 ranks reduce, nearly all of the path is their
    reduction.
    """
    assert main(["explain", "time", str(PLANS / "llama3_405b.scale"), "--critical"]) == 0
    head, first, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["critical", "path", "seconds", "share", "slack"]
    assert first.startswith("reduction: dp")
    assert first.endswith("llama.scale:6")
    on_path = [row for row in (first, *rows) if "%" in row]
    assert 95 <= sum(int(row.split("%")[0].split()[-1]) for row in on_path) <= 101
    assert any(row.startswith("host") and "%" not in row for row in rows)


def test_a_report_has_one_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "time", str(PLANS / "llama3_405b.scale"), "--critical", "--json"]) == 2
    assert "exclude each other" in capsys.readouterr().err
