"""The line of a terminal while a run goes on: cleared before each line that stays, never in a
file.
"""

import io
import re
from pathlib import Path

import pytest
import torch

from helpers.small_log import small_log
from scalec.runtime.config.plan import Metrics
from scalec.runtime.train import progress
from scalec.runtime.train.progress import CLEAR, Progress


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(progress, "OFTEN", 0.0)


def _run(folder: Path, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    """Three steps, of which the last has a line."""
    monkeypatch.setattr("sys.stdout", stream)
    log = small_log(folder, progress=Progress(stream, torch.device("cpu")))
    for step in (1, 2, 3):
        log.step(step, Metrics(loss=torch.tensor(2.0), tokens=torch.tensor(4)), 0.1, due=step == 3)
    log.close()
    return stream.getvalue()


def test_it_says_how_far_a_run_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _run(tmp_path, Terminal(), monkeypatch)
    first, second, last = shown.split(CLEAR)[1:]
    assert re.fullmatch(r"━{8}─{16} 1/3  \d+s left  [\d,]+ tokens/s/process  \d+\.\d GiB\r", first)
    assert second.startswith("━" * 16 + "─" * 8 + " 2/3")
    assert re.fullmatch(r"step 3/3  loss 2.0000 .*\n", last)


def test_it_has_one_line_of_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, _run(tmp_path, Terminal(), monkeypatch).split(CLEAR)[1:3])) == 39 + len(
        "\r"
    )


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_that_clears_nothing_gets_none(
    term: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    assert _run(tmp_path, Terminal(), monkeypatch).startswith("step 3/3")


def test_a_file_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _run(tmp_path, io.StringIO(), monkeypatch)
    assert shown.startswith("step 3/3")
    assert "\x1b" not in shown


def test_it_changes_no_oftener_than_one_can_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "OFTEN", 1000.0)
    assert _run(tmp_path, Terminal(), monkeypatch).count("tokens/s/process") == 2
