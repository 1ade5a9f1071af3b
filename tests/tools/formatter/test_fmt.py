"""`scalec fmt`: files, standard input, `--check`."""

import io
import sys
from pathlib import Path

import pytest

from helpers.commands import CommandLine

UGLY, FINE, WRONG = b"mesh{dp=2}", b"mesh { dp = 2 }\n", b"mesh { dp = }\n"


@pytest.fixture(autouse=True)
def folder(working_folder: Path) -> Path:
    for name, content in {"ugly": UGLY, "fine": FINE, "wrong": WRONG}.items():
        (working_folder / f"{name}.scale").write_bytes(content)
    return working_folder


def _typed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_files_are_rewritten_and_those_that_change_are_named(
    run_scalec: CommandLine, folder: Path
) -> None:
    assert run_scalec("fmt", "fine.scale", "ugly.scale") == (0, "formatted ugly.scale\n", "")
    assert Path("ugly.scale").read_bytes() == FINE
    assert run_scalec("fmt", "fine.scale", "ugly.scale") == (0, "", "")
    assert len([*folder.iterdir()]) == 3


def test_check_writes_nothing(run_scalec: CommandLine) -> None:
    assert run_scalec("fmt", "--check", "fine.scale") == (0, "", "")
    assert run_scalec("fmt", "--check", "fine.scale", "ugly.scale") == (
        1,
        "would format ugly.scale\n",
        "",
    )
    assert Path("ugly.scale").read_bytes() == UGLY


@pytest.mark.parametrize(
    "content", [b"mesh { dp = 2 }\r\n", b"\xef\xbb\xbfmesh { dp = 2 }\n"], ids=["CRLF", "BOM"]
)
def test_what_an_editor_does_not_show_is_a_change_too(
    run_scalec: CommandLine, content: bytes
) -> None:
    Path("fine.scale").write_bytes(content)
    assert run_scalec("fmt", "fine.scale")[:2] == (0, "formatted fine.scale\n")
    assert Path("fine.scale").read_bytes() == FINE


def test_a_wrong_plan_is_left_alone_and_the_others_are_formatted(run_scalec: CommandLine) -> None:
    status, out, err = run_scalec("fmt", "wrong.scale", "missing.scale", "ugly.scale")
    assert (status, out) == (1, "formatted ugly.scale\n")
    assert "error[E0104]" in err
    assert "error[E0101]: there is no file `missing.scale`" in err
    assert Path("wrong.scale").read_bytes() == WRONG


def test_the_mode_of_a_file_and_links_to_it_stay(run_scalec: CommandLine) -> None:
    Path("ugly.scale").chmod(0o640)
    Path("link.scale").symlink_to("ugly.scale")
    assert run_scalec("fmt", "link.scale")[:2] == (0, "formatted link.scale\n")
    assert Path("link.scale").is_symlink()
    assert Path("ugly.scale").read_bytes() == FINE
    assert Path("ugly.scale").stat().st_mode & 0o777 == 0o640


def test_a_file_that_cannot_be_written_stays_whole(
    run_scalec: CommandLine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    assert run_scalec("fmt", "ugly.scale") == (
        2,
        "",
        "error: cannot write `ugly.scale`: no space left on device\n",
    )
    assert Path("ugly.scale").read_bytes() == UGLY
    assert len([*folder.iterdir()]) == 3


def test_standard_input_goes_to_standard_output(
    run_scalec: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _typed(monkeypatch, UGLY)
    assert run_scalec("fmt", "-") == (0, FINE.decode(), "")
    _typed(monkeypatch, UGLY)
    assert run_scalec("fmt", "-", "--check") == (1, "would format standard input\n", "")
    _typed(monkeypatch, FINE)
    assert run_scalec("fmt", "-", "--check") == (0, "", "")


@pytest.mark.parametrize(
    ("content", "code"), [(WRONG, "E0104"), (b"mesh {\n\xff }", "E0101"), (b"#" * 70000, "E0102")]
)
def test_standard_input_that_is_no_plan(
    run_scalec: CommandLine, monkeypatch: pytest.MonkeyPatch, content: bytes, code: str
) -> None:
    _typed(monkeypatch, content)
    status, out, err = run_scalec("fmt", "-")
    assert (status, out) == (1, "")
    assert f"error[{code}]" in err


def test_standard_input_stands_alone(run_scalec: CommandLine) -> None:
    assert run_scalec("fmt", "-", "fine.scale") == (
        2,
        "",
        "error: `-` is standard input and cannot be combined with files\n",
    )
