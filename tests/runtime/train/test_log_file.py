"""The file of a log after crashes, and where the disk refuses."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalec.runtime.train.log_file import NAME, REPEATED, LogFile, mend


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(0, 9), st.integers(0, 40))
def test_each_step_is_there_once_however_the_file_was_cut(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], first: int, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("log")
    steps = sorted(steps)
    whole = "".join(json.dumps({"step": step}) + "\n" for step in steps)
    (folder / NAME).write_text(whole[: len(whole) - min(cut, len(whole))])
    mend(folder, first)
    left = [json.loads(line)["step"] for line in (folder / NAME).read_text().splitlines()]
    assert left == [step for step in steps if step <= first][: len(left)]
    gone = (folder / REPEATED).read_text() if (folder / REPEATED).exists() else ""
    assert len((folder / NAME).read_text()) + len(gone.rstrip("\n")) + 1 >= len(whole) - cut


def test_a_disk_that_refuses_is_told_once_and_the_run_goes_on(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    log = LogFile(gone)
    assert log.write({"step": 1}).startswith(
        f"warning: cannot write to {gone}/log.jsonl: No such file"
    )
    assert log.write({"step": 2}) == ""
    gone.mkdir()
    assert log.write({"step": 3}) == ""
    assert [json.loads(line) for line in log.path.read_text().splitlines()] == [{"step": 3}]


def test_a_line_that_a_full_disk_has_cut_is_one_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogFile(tmp_path)
    log.path.write_text('{"st')
    with monkeypatch.context() as full:
        full.setattr(Path, "open", _refuses)
        assert "No space left" in log.write({"step": 2})
    log.write({"step": 3})
    assert log.path.read_text().splitlines() == ['{"st', '{"step": 3}']


def _refuses(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")
