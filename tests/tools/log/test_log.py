"""`scalec log`: charts of a run, of two on one scale, and the page; logs that are none."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from math import cos, exp
from pathlib import Path

import pytest

from helpers.commands import CommandLine
from scalec.compiler.cli import main
from scalec.tools.log.run_log import LOSS, Run, bin_points, read


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of 400 steps, of which one learns faster and skips a step."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "72")
    for name, rate in (("fast", 0.02), ("slow", 0.008)):
        records: list[dict[str, float]] = []
        for step in range(10, 410, 10):
            records.append(
                {"step": step, "loss": 2 + 3.5 * exp(-rate * step) + 0.03 * cos(step), "lr": 1e-3}
            )
            records[-1] |= {
                "norm": 9.0 if step == 200 else 1 + 0.2 * cos(3 * step),
                "tokens_per_s_gpu": 1e6 * rate,
            }
            records += [{"step": step, "validation": 2.1 + 3 * exp(-rate * step)}] * (
                step % 100 == 0
            )
        records += [{"step": 205, "skipped": True}] * (name == "slow")
        Path(name).mkdir()
        Path(name, "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_run(run_scalec: CommandLine, golden: Callable[[str, str], None]) -> None:
    golden("log/one.txt", run_scalec.output("log", "fast"))


def test_two_runs(run_scalec: CommandLine, golden: Callable[[str, str], None]) -> None:
    out = run_scalec.output("log", "fast", "slow/log.jsonl")
    golden("log/two.txt", out)
    assert max(map(len, out.splitlines())) <= 72


def test_the_speed_of_processes_has_their_name(run_scalec: CommandLine) -> None:
    on_cpus = Path("slow/log.jsonl").read_text().replace("tokens_per_s_gpu", "tokens_per_s_process")
    Path("slow/log.jsonl").write_text(on_cpus)
    alone = run_scalec.output("log", "slow")
    assert "tokens/s/process" in alone.splitlines()[0]
    assert "tokens/s/GPU" not in alone
    both = run_scalec.output("log", "fast", "slow")
    assert "tokens/s/GPU or tokens/s/process" in both.splitlines()[0]
    assert {"tokens/s/GPU of fast", "tokens/s/process of slow"} <= {*both.splitlines()}


def test_the_page_has_a_picture_for_each_number(run_scalec: CommandLine) -> None:
    assert run_scalec.output("log", "fast", "slow", "-o", "log.html") == "wrote log.html\n"
    text = Path("log.html").read_text(encoding="utf-8")
    assert re.findall(r"<h2>(.*)</h2>", text) == [
        "loss",
        "validation loss",
        "gradient norm",
        "tokens/s/GPU",
    ]
    assert (
        text.count('class="trace l0"')
        == text.count('class="trace l1"')
        == text.count(">step</text>")
        == 4
    )
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    run_scalec.output("log", "fast", "-o", "log.html")
    Path("log.html").write_text("mine")
    assert main(["log", "fast", "-o", "log.html"]) == 2


def test_a_single_validation_has_no_picture(run_scalec: CommandLine) -> None:
    """The table has its number."""
    lines = Path("fast/log.jsonl").read_text().splitlines(keepends=True)
    held = [line for line in lines if '"validation"' in line]
    Path("fast/log.jsonl").write_text("".join(line for line in lines if line not in held[:-1]))
    run_scalec.output("log", "fast", "-o", "log.html")
    text = Path("log.html").read_text(encoding="utf-8")
    assert re.findall(r"<h2>(.*)</h2>", text) == ["loss", "gradient norm", "tokens/s/GPU"]


def test_no_grammar_is_loaded() -> None:
    code = "from scalec.compiler.cli import main; main(['log', 'fast', '-o', 'log.html'])"
    code += "; import sys; print('lark' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout == "wrote log.html\nFalse\n"


def test_a_run_of_one_step(run_scalec: CommandLine) -> None:
    Path("fast", "log.jsonl").write_text('{"step": 1, "loss": 5.5}\n')
    assert "   5.5000 ┤" in run_scalec.output("log", "fast")
    run_scalec.output("log", "fast", "-o", "log.html")
    assert "<circle" in Path("log.html").read_text(encoding="utf-8")


def test_runs_of_one_name_are_called_by_their_paths(run_scalec: CommandLine) -> None:
    Path("old").mkdir()
    Path("slow").rename("old/fast")
    assert "loss of old/fast" in run_scalec.output("log", "fast", "old/fast")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no loss: no step is logged yet"),
        ("{", "has no loss: no step is logged yet"),
        ("{\n", "is no log of a run: a line of it is no record of a step"),
        ("[1]\n", "is no log of a run"),
        ('{"loss": 1}\n', "is no log of a run"),
        ('{"step": 1, "loss": "low"}\n', "is no log of a run"),
    ],
)
def test_a_file_that_is_no_log(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("fast", "log.jsonl").write_text(text)
    assert main(["log", "fast"]) == 2
    assert message in capsys.readouterr().err


def test_a_run_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["log", "none"]) == 2
    assert (
        "cannot read `none`: no such file or directory; name the folder of a run"
        in capsys.readouterr().err
    )
    assert main(["log", *["fast"] * 9]) == 2


def test_of_a_repeated_step_the_last_counts() -> None:
    run = read(
        "run", '{"step": 2, "loss": 9.0}\n{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n'
    )
    assert run
    assert run.points(LOSS) == [(1, 3.0), (2, 2.0)]


def test_values_that_are_not_finite_are_left_out() -> None:
    assert Run("run", ({"step": 1, "loss": 1.0}, {"step": 2, "loss": float("nan")})).points(
        LOSS
    ) == [(1, 1.0)]


def test_a_column_is_the_mean_of_its_steps() -> None:
    assert [*bin_points([(0, 1.0), (1, 3.0), (9, 5.0)], (0, 9), 4)] == [(0, 2.0), (3, 5.0)]


def test_a_last_line_that_is_cut_off_is_left_out(run_scalec: CommandLine) -> None:
    whole = run_scalec.output("log", "fast")
    with Path("fast", "log.jsonl").open("a") as file:
        file.write('{"step": 410, "lo')
    assert run_scalec.output("log", "fast") == whole
