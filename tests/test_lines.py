"""`make lines`: each file has a concern, each concern has files, and the limits hold."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINES = runpy.run_path(str(ROOT / "benchmarks" / "lines.py"))


def test_every_file_belongs_to_a_concern_and_every_concern_has_files() -> None:
    found = {LINES["concern_of"](path.relative_to(ROOT).as_posix())[0] for path in LINES["modules"]()}
    assert found == {*LINES["CORE"], *LINES["APART"]}


def test_every_folder_and_file_of_a_concern_is_there() -> None:
    named = [path for concerns in (LINES["CORE"], LINES["APART"]) for paths in concerns.values() for path in paths]
    assert not [path for path in named if not (ROOT / path).exists()]


def test_a_file_of_no_concern_is_told() -> None:
    with pytest.raises(AssertionError, match=r"compiler/new\.py belongs to no concern"):
        LINES["concern_of"]("compiler/new.py")


def test_blank_lines_comments_and_docstrings_hold_no_code() -> None:
    assert LINES["lines_of"]('"""A module.\n\nMore.\n"""\n\n# why\nX = """a\nb"""\n') == (8, 2)


def test_the_limits_hold(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert LINES["main"]() == 0, capsys.readouterr().out
    monkeypatch.setitem(LINES["LIMITS"], "core", 1)
    assert LINES["main"]() == 1
