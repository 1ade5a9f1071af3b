"""`scalec plans`, and names of shipped plans in the place of files."""

import re
from pathlib import Path

import pytest

import scalec
from scalec.compiler.analysis.communication import parameter_count
from scalec.compiler.cli import main
from scalec.compiler.cli.arguments import options
from scalec.compiler.cli.commands import COMMANDS
from scalec.compiler.cli.plans import about
from scalec.compiler.frontend import resolve
from scalec.compiler.syntax.limits import load

PLANS = Path(__file__).parents[2] / "plans"


def test_the_list_has_every_plan_and_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plans"]) == 0
    out = capsys.readouterr().out
    names = re.findall(r"^scalec:(\S+)", out, re.MULTILINE)
    assert sorted(names) == sorted(
        path.relative_to(PLANS).with_suffix("").as_posix() for path in PLANS.rglob("*.scale")
    )


def test_the_list_says_parameters_and_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plans"])
    out = capsys.readouterr().out
    for name in ("llama3_70b", "tiny_llama", "mixtral_8x7b"):
        program = resolve(load(PLANS / f"{name}.scale"))
        (line,) = re.findall(rf"^scalec:{name} .*$", out, re.MULTILINE)
        gpu = f" x {program.cluster.gpu}" if program.cluster.gpu else ""
        assert f" {parameter_count(program):,}  " in line
        assert f" {program.ranks:,}{gpu}  " in line


@pytest.mark.parametrize(
    ("comment", "sentence"),
    [
        ("# Llama 3 8B on 128 GPUs: sixteen replicas.\nuse", "Llama 3 8B on 128 GPUs"),
        (
            "# The decoder (Dai et al. 2024) of\n# two lines.  And more.\n",
            "The decoder (Dai et al. 2024) of two lines",
        ),
        ("mesh { }\n# later\n", ""),
    ],
)
def test_one_line_about_a_plan(comment: str, sentence: str) -> None:
    assert about(comment) == sentence


TAKING = (
    "compile",
    "run",
    "ir",
    "check",
    "diff",
    "plan",
    "calibrate",
    "doctor",
    "schedule",
    "report",
    "verify",
)


@pytest.mark.parametrize("command", TAKING)
def test_commands_take_the_name_of_a_plan(command: str) -> None:
    name = "scalec:tiny_llama"
    words = [name, name] if command == "diff" else [name]
    given = vars(options([command, *words, *(["-o", "x.toml"] if command == "calibrate" else [])]))
    paths = given.get("plans") or [given.get("plan") or given["model"]]
    assert set(paths) == {PLANS / "tiny_llama.scale"}


@pytest.mark.parametrize(
    "words",
    [
        ["explain", "memory", "scalec:tiny_llama"],
        ["explain", "time", "--json", "scalec:tiny_llama"],
        ["launch", "slurm", "scalec:tiny_llama"],
        ["convert", "scalec:tiny_llama", "x"],
    ],
)
def test_commands_take_the_name_of_a_plan_among_other_words(words: list[str]) -> None:
    assert options(words).plan == PLANS / "tiny_llama.scale"


def test_all_commands_that_take_a_plan_are_tried() -> None:
    others = {
        "new",
        "plans",
        "data",
        "explain",
        "launch",
        "convert",
        "log",
        "loads",
        "schema",
        "fmt",
        "lsp",
        "import",
        "completion",
    }
    assert {command.name for command in COMMANDS} - others == {*TAKING}


def test_a_name_that_does_not_ship(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["check", "scalec:tiny_lama"], ["explain", "time", "--json", "scalec:tiny_lama"]):
        with pytest.raises(SystemExit):
            main(words)
        said = "`scalec:tiny_lama` does not come with scalec: did you mean `scalec:tiny_llama`?"
        assert f"argument PLAN: {said}" in capsys.readouterr().err


def test_the_library_takes_the_name_of_a_plan() -> None:
    assert str(scalec.plan("scalec:tiny_llama").ir) == str(
        scalec.plan(PLANS / "tiny_llama.scale").ir
    )


def test_gpus_that_begin_alike_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "scalec:llama3_8b", "--gpus", "64", "--cluster", "h100"]) == 2
    assert (
        "did you mean `h100_500w` or `h100_nvl` or `h100_pcie` or `h100_sxm`?"
        in capsys.readouterr().err
    )
