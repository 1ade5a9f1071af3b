"""The example of a user's own tests passes as it stands, and fails where a plan is wrong."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scalec.testing import assert_equal_step, assert_mutants_caught

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_example_passes(tmp_path: Path) -> None:
    """In a pytest of its own, without the settings of this repository."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", "/dev/null"]
    found = subprocess.run(
        [*command, str(EXAMPLES / "test_my_plan.py")], cwd=tmp_path, check=False, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "10 passed" in found.stdout


def test_a_plan_that_is_wrong_fails_with_its_diagnostic(tmp_path: Path) -> None:
    text = (EXAMPLES.parent / "plans" / "tiny_llama.scale").read_text(encoding="utf-8")
    plan = tmp_path / "mine.scale"
    shutil.copytree(EXAMPLES.parent / "plans" / "models", tmp_path / "models")
    plan.write_text(text.replace("tp = 2", "tp = 3"), encoding="utf-8")
    with pytest.raises(AssertionError, match="error\\[E0510\\]: `heads` cannot be split over `tp`") as caught:
        assert_equal_step(plan)
    assert "mine.scale:" in str(caught.value)


def test_the_mutants_of_a_plan_are_caught() -> None:
    """One of few ops, since the audit of a whole model takes ten seconds."""
    model = "x = embedding(tokens, wte[vocab, hidden])  loss = cross_entropy(x @ head[hidden -> vocab], labels)"
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
