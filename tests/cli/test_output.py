"""Reports on a terminal: the same text, with words set apart; elsewhere nothing of that is even
loaded.
"""

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalec.compiler.cli import main
from scalec.compiler.cli.output import show, to_styled_text

PLAN = str(Path(__file__).parents[2] / "plans" / "tiny_llama.scale")
ESCAPES = re.compile(r"\x1b\[[\d;]*m")


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def on_a_terminal(text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What `show` writes to a terminal of 16 colours."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    show(text)
    return stream.getvalue()


@given(st.text(st.characters(exclude_categories=("C",))))
def test_the_text_stays(text: str) -> None:
    assert to_styled_text(text).plain == text


@pytest.mark.parametrize("words", [("memory",), ("collectives",)])
def test_a_report_is_the_same_but_for_styles(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["explain", *words, PLAN]) == 0
    plain = capsys.readouterr().out
    shown = on_a_terminal(plain.removesuffix("\n"), monkeypatch)
    assert shown != plain
    assert ESCAPES.sub("", shown) == plain


def test_words_that_are_set_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "fits: needs 8.4 MiB of `tp`\n\nper rank  bytes\nstate     12 KiB  llama.scale:22\n[/red] 3"
    )
    shown = on_a_terminal(text, monkeypatch)
    for style, word in (
        ("32", "fits"),
        ("36", "8.4 MiB"),
        ("1", "tp"),
        ("1", "per rank  bytes"),
        ("35", "llama.scale:22"),
    ):
        assert f"\x1b[{style}m{word}\x1b[0m" in shown
    assert "[/red]" in shown


def test_lines_are_never_cut_or_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert ESCAPES.sub("", on_a_terminal("word " * 40, monkeypatch)) == "word " * 40 + "\n"


def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("NO_COLOR", "1")
    show("fits 3")
    assert stream.getvalue() == "fits 3\n"


def test_without_a_terminal_nothing_of_it_is_loaded() -> None:
    code = f"from scalec.compiler.cli import main; main(['explain', 'memory', {PLAN!r}])"
    code += "; import sys; print('rich' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.endswith("\nFalse\n")
