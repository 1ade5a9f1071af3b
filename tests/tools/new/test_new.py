"""`scalec new`: a first plan for the machine at hand, which compiles as it is; on this one it
trains.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest

from scalec.compiler.cli import main
from scalec.compiler.syntax.limits import load
from scalec.compiler.tuning.lowering import compile_plan
from scalec.tools.new.command import Machine


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, list[str]], None]:
    """`machine(cores, gpus)` has the command find these; at first 2 cores and no GPU."""
    monkeypatch.chdir(tmp_path)

    def has(cores: int, gpus: list[str]) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
        tools = tmp_path / "tools"
        tools.mkdir(exist_ok=True)
        lines = "\n".join(f"echo '{gpu}'" for gpu in gpus) or "exit 9"
        (tools / "nvidia-smi").write_text(f"#!/bin/sh\n{lines}\n")
        (tools / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tools}:/bin:/usr/bin")

    has(2, [])
    return has


def test_the_plan_for_two_cores(
    golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new"]) == 0
    said = (
        "wrote first.scale, for 2 CPU cores and no GPU\nto train it:\n\n  scalec run first.scale\n"
    )
    assert capsys.readouterr().out == said
    golden("new/cpu.scale", Path("first.scale").read_text(encoding="utf-8"))


def test_the_plan_for_gpus(
    machine: Callable[[int, list[str]], None], golden: Callable[[str, str], None]
) -> None:
    machine(64, ["NVIDIA H100 80GB HBM3"] * 8)
    assert main(["new", "mine.scale"]) == 0
    golden("new/gpus.scale", Path("mine.scale").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("cores", "gpus", "expected"),
    [(1, 0, 1), (2, 0, 2), (3, 0, 2), (96, 0, 4), (8, 1, 1), (8, 3, 2), (96, 8, 8)],
)
def test_plans_compile_as_they_are(
    cores: int,
    gpus: int,
    expected: int,
    machine: Callable[[int, list[str]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine(cores, ["NVIDIA GeForce RTX 4090"] * gpus)
    assert (
        main(["new", "one.scale"])
        == main(["fmt", "--check", "one.scale"])
        == main(["check", "one.scale"])
        == 0
    )
    program = compile_plan(load(Path("one.scale")))
    assert program.ranks == expected
    assert program.cluster.gpu == ("rtx_4090" if gpus else "")
    assert not capsys.readouterr().err
    swapped = re.sub(
        r"dp = (\d+)  tp = 1", r"dp = 1  tp = \1", Path("one.scale").read_text(encoding="utf-8")
    )
    Path("one.scale").write_text(swapped)
    assert main(["check", "one.scale"]) == 0


SHIPPED = sorted((Path(__file__).parents[3] / "plans").rglob("*.scale"))
LEAST = {"qwen2_5_7b": 8_000_000, "qwen2": 8_000_000}
"""Models whose heads ask for wide layers, and a size that they can have."""


@pytest.mark.sample(7)
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_model_that_comes_with_scalec_at_another_size(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = LEAST.get(path.stem, 2_000_000)
    name = path.stem if path.parent.name == "plans" else f"models/{path.stem}"
    words = ["--from", name, "--size", f"{size // 1000}K"]
    assert main(["new", "one.scale", *words]) == main(["fmt", "--check", "one.scale"]) == 0
    assert main(["check", "one.scale"]) == 0
    assert not capsys.readouterr().err
    text = Path("one.scale").read_text(encoding="utf-8")
    program = compile_plan(load(Path("one.scale")))
    count = sum(prod(program.size(dim) for dim in param.type.dims) for param in program.params)
    assert size / 1.5 < count < size * 1.5
    said = re.search(r"([\d,]+) parameters", text)
    assert said
    padding = {"distilbert_base", "distilbert", "gpt2_124m", "gpt2"}
    assert int(said[1].replace(",", "")) == count or path.stem in padding


def test_the_plan_of_a_model_that_comes_with_scalec(golden: Callable[[str, str], None]) -> None:
    assert main(["new", "mine.scale", "--from", "llama3_8b", "--size", "30M"]) == 0
    golden("new/from_llama.scale", Path("mine.scale").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["--from", "llama3_8"],
            "`scalec:llama3_8` does not come with scalec: did you mean `scalec:llama3_8b`?",
        ),
        (["--from", "qwen2_5_7b", "--size", "1M"], "no sizes of `qwen2_5_7b` are near that"),
        (
            ["--from", "llama3_8b", "--size", "30"],
            "`30` is not a number of parameters: write 30M, 1.5B or 500K",
        ),
        (["--size", "30M"], "--size goes with a model that comes with scalec: --from llama3_8b"),
    ],
)
def test_sizes_that_cannot_be(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["new", "mine.scale", *words])
    except SystemExit as end:
        status = int(end.code or 0)
    assert status == 2
    assert error in capsys.readouterr().err
    assert not Path("mine.scale").exists()


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA H100 NVL", "h100_nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100_80gb"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA GeForce RTX 5090", "rtx_5090"),
        ("NVIDIA RTX A6000", "rtx_a6000"),
        ("Tesla T4", "t4"),
        ("Something Else", ""),
    ],
)
def test_gpus_by_their_makers_names(name: str, gpu: str) -> None:
    assert Machine(8, (name,)).gpu == gpu


def test_text_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    Path("notes").mkdir()
    Path("notes/a.txt").write_text("some words\n" * 100)
    assert main(["new", "mine.scale", "--text", "notes/*.txt"]) == 0
    text = Path("mine.scale").read_text(encoding="utf-8")
    assert '{ files = ["notes/*.txt"]  holdout = 5% }' in text, (
        "of a single file its last part is held out"
    )
    Path("notes/b.txt").write_text("some words\n" * 100)
    assert main(["new", "two.scale", "--text", "notes/*.txt"]) == 0
    two = Path("two.scale").read_text(encoding="utf-8")
    assert '{ files = ["notes/*.txt"] } # holdout = 5% would keep whole files' in two
    for at in range(20):
        Path(f"notes/{at}.txt").write_text("more words\n")
    assert main(["new", "many.scale", "--text", "notes/*.txt"]) == 0
    assert '{ files = ["notes/*.txt"]  holdout = 5% }' in Path("many.scale").read_text(
        encoding="utf-8"
    )
    assert main(["new", "none.scale", "--text", "nots/*.txt"]) == 2
    assert "`nots/*.txt` is no file that holds anything, looked for in" in capsys.readouterr().err
    assert not Path("none.scale").exists()


def test_nothing_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    Path("first.scale").write_text("mine")
    assert main(["new"]) == main(["new", "plan.txt"]) == main(["new", "none/a.scale"]) == 2
    errors = capsys.readouterr().err
    assert "`first.scale` exists: name another, as in `scalec new second.scale`" in errors
    assert "a plan's name ends in `.scale`: scalec new plan.scale" in errors
    assert "cannot write `none/a.scale`: no such file or directory" in errors
    assert Path("first.scale").read_text() == "mine"


def test_it_trains(tmp_path: Path, machine: Callable[[int, list[str]], None]) -> None:
    machine(1, [])
    Path("words.txt").write_text("some words, and some more\n" * 1000)
    assert main(["new", "--text", "words.txt"]) == 0
    command = [
        sys.executable,
        "-m",
        "scalec",
        "run",
        "first.scale",
        "--",
        "--steps",
        "3",
        "--device",
        "cpu",
    ]
    found = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "finished 3 steps" in found.stdout
    assert main(["log", "runs/first"]) == 0


@pytest.mark.long
def test_what_it_trains_is_exported_and_begun_with_on_another_mesh(tmp_path: Path) -> None:
    """The plan has no `names hf`."""
    Path("words.txt").write_text("some words, and some more\n" * 1000)
    assert main(["new", "--text", "words.txt"]) == 0
    first = Path("first.scale").read_text(encoding="utf-8")
    assert "mesh { dp = 2  tp = 1 }" in first
    Path("second.scale").write_text(
        first.replace("mesh { dp = 2  tp = 1 }", "mesh { dp = 1  tp = 2 }")
    )

    def run(*words: str) -> str:
        command = [sys.executable, *words]
        result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def get_first_loss(output: str) -> float:
        (loss,) = re.findall(r"^step +1/\d+ +loss ([\d.]+)", output, re.MULTILINE)
        return float(loss)

    options = ("--steps", "10", "--log-every", "1", "--device", "cpu")
    trained = run("-m", "scalec", "run", "first.scale", "--", *options)
    exported = run("out/first/train.py", "--export", "weights")
    assert "tensors have the parameters' own names" in exported
    begun = run("-m", "scalec", "run", "second.scale", "--", *options, "--init", "weights")
    assert "beginning with weights" in begun
    assert get_first_loss(begun) < 0.9 * get_first_loss(trained)
