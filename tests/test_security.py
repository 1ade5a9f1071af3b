"""SECURITY.md: which commands run the code of a plan's own functions, and which never do."""

from pathlib import Path

import pytest

from scalec.compiler.cli import main

ROOT = Path(__file__).parents[1]
MARK = "imported"
MODULE = f"""\
from pathlib import Path

Path({MARK!r}).touch()


def doubled(x):
    return 2 * x
"""
PLAN = """\
op doubled(linear x[.., d]) -> [.., d] over .., d from "own:doubled"

model small(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 256  hidden = 8 }
  init ~ normal(0.1)
  x = embedding(tokens, wte[vocab, hidden])
  loss = cross_entropy(doubled(x) @ head[hidden -> vocab], labels)
}
train {
  seq = 16  global_batch = 2  microbatch = 2  steps = 1
  optimizer adamw { lr = 1e-3 }
  data text       { files = [python_stdlib] }
}
"""
NEVER = {
    "verify": "verify plan.scale",
    "explain": "explain memory plan.scale",
    "report": "report plan.scale -o report.html",
    "diff": "diff plan.scale plan.scale",
    "ir": "ir plan.scale",
    "fmt": "fmt --check plan.scale",
}
UNTRIED = ("check --no-try plan.scale", "compile --no-try plan.scale")
TRIED = ("check plan.scale", "compile plan.scale")


@pytest.fixture
def folder(working_folder: Path) -> Path:
    """The working folder, with a plan whose function leaves a mark when it is imported."""
    (working_folder / "own.py").write_text(MODULE)
    (working_folder / "plan.scale").write_text(PLAN)
    return working_folder


@pytest.mark.parametrize("line", [*NEVER.values(), *UNTRIED])
def test_a_command_that_never_runs_the_function(line: str, folder: Path) -> None:
    assert main(line.split()) == 0
    assert not (folder / MARK).exists()


@pytest.mark.parametrize("line", TRIED)
def test_a_command_that_tries_the_function(line: str, folder: Path) -> None:
    """The mark shows that the other test can see an import."""
    assert main(line.split()) == 0
    assert (folder / MARK).exists()


def test_the_page_names_the_commands_that_never_do() -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    sentence = " ".join(page.partition("`--no-try`, which does not import it.")[2].split())
    assert all(f"`{name}" in sentence.partition("never import it")[0] for name in NEVER)
