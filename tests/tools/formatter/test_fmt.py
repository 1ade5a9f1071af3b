"""`scalec fmt`: files, standard input, `--check`."""

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scalec.compiler import cli

UGLY, FINE, WRONG = b"mesh{dp=2}", b"mesh { dp = 2 }\n", b"mesh { dp = }\n"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, content in {"ugly": UGLY, "fine": FINE, "wrong": WRONG}.items():
        (tmp_path / f"{name}.scale").write_bytes(content)
    return tmp_path


@pytest.fixture
def fmt(capsys: pytest.CaptureFixture[str]) -> Run:
    """`fmt(*words)` runs `scalec fmt`: its exit status, standard output and standard error."""

    def run(*words: str) -> tuple[int, str, str]:
        status = cli.main(["fmt", *words])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def _typed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_files_are_rewritten_and_those_that_change_are_named(fmt: Run, folder: Path) -> None:
    assert fmt("fine.scale", "ugly.scale") == (0, "formatted ugly.scale\n", "")
    assert Path("ugly.scale").read_bytes() == FINE
    assert fmt("fine.scale", "ugly.scale") == (0, "", "")
    assert len([*folder.iterdir()]) == 3


def test_check_writes_nothing(fmt: Run) -> None:
    assert fmt("--check", "fine.scale") == (0, "", "")
    assert fmt("--check", "fine.scale", "ugly.scale") == (1, "would format ugly.scale\n", "")
    assert Path("ugly.scale").read_bytes() == UGLY


@pytest.mark.parametrize(
    "content", [b"mesh { dp = 2 }\r\n", b"\xef\xbb\xbfmesh { dp = 2 }\n"], ids=["CRLF", "BOM"]
)
def test_what_an_editor_does_not_show_is_a_change_too(fmt: Run, content: bytes) -> None:
    Path("fine.scale").write_bytes(content)
    assert fmt("fine.scale")[:2] == (0, "formatted fine.scale\n")
    assert Path("fine.scale").read_bytes() == FINE


def test_a_wrong_plan_is_left_alone_and_the_others_are_formatted(fmt: Run) -> None:
    status, out, err = fmt("wrong.scale", "missing.scale", "ugly.scale")
    assert (status, out) == (1, "formatted ugly.scale\n")
    assert "error[E0104]" in err
    assert "error[E0101]: there is no file `missing.scale`" in err
    assert Path("wrong.scale").read_bytes() == WRONG


def test_the_mode_of_a_file_and_links_to_it_stay(fmt: Run) -> None:
    Path("ugly.scale").chmod(0o640)
    Path("link.scale").symlink_to("ugly.scale")
    assert fmt("link.scale")[:2] == (0, "formatted link.scale\n")
    assert Path("link.scale").is_symlink()
    assert Path("ugly.scale").read_bytes() == FINE
    assert Path("ugly.scale").stat().st_mode & 0o777 == 0o640


def test_a_file_that_cannot_be_written_stays_whole(
    fmt: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    assert fmt("ugly.scale") == (
        2,
        "",
        "error: cannot write `ugly.scale`: no space left on device\n",
    )
    assert Path("ugly.scale").read_bytes() == UGLY
    assert len([*folder.iterdir()]) == 3


def test_standard_input_goes_to_standard_output(fmt: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _typed(monkeypatch, UGLY)
    assert fmt("-") == (0, FINE.decode(), "")
    _typed(monkeypatch, UGLY)
    assert fmt("-", "--check") == (1, "would format standard input\n", "")
    _typed(monkeypatch, FINE)
    assert fmt("-", "--check") == (0, "", "")


@pytest.mark.parametrize(
    ("content", "code"), [(WRONG, "E0104"), (b"mesh {\n\xff }", "E0101"), (b"#" * 70000, "E0102")]
)
def test_standard_input_that_is_no_plan(
    fmt: Run, monkeypatch: pytest.MonkeyPatch, content: bytes, code: str
) -> None:
    _typed(monkeypatch, content)
    status, out, err = fmt("-")
    assert (status, out) == (1, "")
    assert f"error[{code}]" in err


def test_standard_input_stands_alone(fmt: Run) -> None:
    assert fmt("-", "fine.scale") == (
        2,
        "",
        "error: `-` is standard input and cannot be combined with files\n",
    )
