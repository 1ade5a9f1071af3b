"""Each example does what its first line says; that of a user's own tests fails where a plan is
wrong.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scalec.compiler.syntax.limits import load
from scalec.testing import assert_equal_step, assert_mutants_caught
from scalec.tools.formatter import format_plan

EXAMPLES = Path(__file__).parents[1] / "examples"
PLANS = sorted(EXAMPLES.glob("*.scale"))

# what makes a command short, or independent of this repository's settings, and what it then says
SHORT = {
    "run": (["--", "--steps", "2"], "finished 2 steps"),
    "verify": ([], "make the same update"),
    "pytest": (["-p", "no:cacheprovider", "-p", "no:xdist", "-c", "/dev/null"], " passed"),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "example", [*PLANS, *sorted(EXAMPLES.glob("test_*.py"))], ids=lambda path: path.stem
)
def test_the_first_line_runs(example: Path, tmp_path: Path) -> None:
    """From a folder like this repository's, with the programs that stand beside this Python."""
    for folder in ("examples", "plans"):
        shutil.copytree(EXAMPLES.parent / folder, tmp_path / folder)
    program, *words = example.read_text(encoding="utf-8").split("\n")[0].lstrip('# "').split()
    more, says = SHORT[next(word for word in (words[0], Path(program).name) if word in SHORT)]
    command = [str(Path(sys.executable).parent / program.removeprefix(".venv/bin/")), *words, *more]
    found = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    assert says in found.stdout


@pytest.mark.parametrize("example", PLANS, ids=lambda path: path.stem)
def test_examples_are_laid_out(example: Path) -> None:
    source = load(example)
    assert format_plan(source) == source.text


def test_a_plan_that_is_wrong_fails_with_its_diagnostic(tmp_path: Path) -> None:
    text = (EXAMPLES.parent / "plans" / "tiny_llama.scale").read_text(encoding="utf-8")
    plan = tmp_path / "mine.scale"
    shutil.copytree(EXAMPLES.parent / "plans" / "models", tmp_path / "models")
    plan.write_text(text.replace("tp = 2", "tp = 3"), encoding="utf-8")
    with pytest.raises(
        AssertionError, match="error\\[E0510\\]: `heads` cannot be split over `tp`"
    ) as caught:
        assert_equal_step(plan)
    assert "mine.scale:" in str(caught.value)


def test_the_mutants_of_a_plan_are_caught() -> None:
    """One of few ops, since the audit of a whole model takes ten seconds."""
    model = (
        "x = embedding(tokens, wte[vocab, hidden])  loss = cross_entropy(x @ head[hidden ->"
        " vocab], labels)"
    )
    assert_mutants_caught(f"""
        model tiny(tokens[batch, seq], labels[batch, seq]) {{
          dims {{ vocab = 16  hidden = 4 }}
          init ~ normal(0.02)
          {model}
        }}
        mesh {{ dp = 2  tp = 2 }}
        shard {{ batch over dp  vocab over tp }}
        train {{
          seq = 8  global_batch = 8  microbatch = 2  steps = 1
          optimizer sgd {{ lr = 0.5  clip = 1.0 }}
          data text {{ files = [python_stdlib] }}
        }}
    """)


def test_a_file_that_is_not_there_is_an_assertion_too() -> None:
    with pytest.raises(AssertionError, match="error\\[E0101\\]"):
        assert_equal_step(Path("nowhere.scale"))
