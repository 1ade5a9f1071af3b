"""`scalec explain VALUE PLAN`, and `scalec ir --diff PASS PLAN`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.commands import CommandLine
from scalec.compiler.cli import main

PLANS = Path(__file__).parents[2] / "plans"
TINY = str(PLANS / "tiny_llama.scale")


def test_a_value_and_parameters(
    run_scalec: CommandLine, golden: Callable[[str, str], None]
) -> None:
    said = (
        f"# {name}\n\n{run_scalec.output('explain', name, TINY)}"
        for name in ("x", "q", "wq", "norm1")
    )
    golden("explained_values.txt", "\n".join(said))


@pytest.mark.parametrize(("name", "plan"), [("x", "llama3_8b"), ("wo", "mixtral_8x7b")])
def test_seconds_are_told_where_they_are_known(
    name: str, plan: str, run_scalec: CommandLine
) -> None:
    """Of each call, in a pipeline too."""
    _, _, table = run_scalec.output("explain", name, str(PLANS / f"{plan}.scale")).partition(
        "coercion  "
    )
    calls = [line for line in table.splitlines() if " × " in line]
    assert calls
    assert all(" ms  " in line for line in calls)


@pytest.mark.parametrize("plan", ["tiny_hybrid", "tiny_pipeline", "gpt2_124m"])
def test_every_value_can_be_explained(plan: str, run_scalec: CommandLine) -> None:
    from scalec.compiler.cli.compile import load
    from scalec.compiler.reports.value import names_of

    path = PLANS / f"{plan}.scale"
    for name in names_of(load(path).model)[::6]:
        assert run_scalec.output("explain", name, str(path))


def test_a_value_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("explain", "wqq", TINY)) == 2
    assert capsys.readouterr().err == "error: the plan has no value `wqq`: did you mean `wq`?\n"


def test_what_a_pass_changes(run_scalec: CommandLine) -> None:
    lines = run_scalec.output("ir", TINY, "--diff", "insert_collectives").splitlines()
    assert lines[:2] == ["--- after choose_layout", "+++ after insert_collectives"]
    assert any(
        line.startswith("+    a.1:") and "coerce(a) <axes=[tp], from=S(seq), to=R>" in line
        for line in lines
    )
    assert run_scalec.output("ir", TINY, "--diff", "divide_stages") != ""
