"""`scalec completion`: what each shell is given when Tab is pressed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scalec.compiler.cli import main
from scalec.compiler.cli.completion import SHELLS

BIN = Path(sys.executable).parent
LINES = {  # the words so far → what bash may put in the place of the last one
    "scalec com": {"compile", "completion"},
    "scalec compile --no-v": {"--no-verify"},
    "scalec compile --target ": {"runtime", "dtensor"},
    "scalec explain mem": {"memory"},
    "scalec check mine/t": {"mine/tiny.scale", "mine/two.ir"},
    "scalec check sc": {"scalec:"},
    # a colon begins a word of bash
    "scalec check scalec:llama3_8": {"llama3_8b", "llama3_8b_long"},
    "scalec report mine/tiny.scale -o mine/n": {"mine/notes.txt"},
}
COMPLETE = """
eval "$(scalec completion bash)"
while read -r line; do
  COMP_LINE="${line%|}" COMP_POINT=$((${#line} - 1)) COMP_TYPE=9
  _python_argcomplete scalec
  (IFS=,; echo "${COMPREPLY[*]}")
done
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    for name in ("tiny.scale", "two.ir", "third.txt", "notes.txt"):
        (tmp_path / "mine" / name).touch()
    return tmp_path


def test_bash(folder: Path) -> None:
    path = f"{BIN}:{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-c", COMPLETE],
        check=True,
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PATH": path},
        input="".join(f"{line}|\n" for line in LINES),
    )
    answers = [
        {word.strip() for word in answer.split(",")} for answer in result.stdout.splitlines()
    ]
    assert dict(zip(LINES, answers, strict=True)) == LINES


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_each_shell_has_the_parser_answer(
    shell: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The variables are the ones that the script sets; neither zsh nor fish need be installed."""
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    variables = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_SHELL": shell}
    assert all(name in script for name in variables)
    line, answer = "scalec check scalec:tiny_fi", folder / "answer"
    variables |= {
        "COMP_LINE": line,
        "COMP_POINT": f"{len(line)}",
        "_ARGCOMPLETE_STDOUT_FILENAME": f"{answer}",
    }
    subprocess.run([BIN / "scalec"], check=True, env=os.environ | variables)
    assert "tiny_five" in answer.read_text()


def test_what_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert main(["completion", "bash"]) == 2
    assert capsys.readouterr().err == (
        "error: `scalec completion` needs argcomplete: pip install 'scalec[completion]'\n"
    )
