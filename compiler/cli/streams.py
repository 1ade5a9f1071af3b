"""Standard streams that take any text, in whatever encoding, and though nobody reads it to the end.

Purpose: no sign and no closed pipe ends a command.  Non-goals: colours (`diagnostics.wants_colour`).
"""

import os
import sys
from codecs import register_error
from collections.abc import Generator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any

PLAIN = {"×": "x", "→": "->", "·": ".", "…": "...", "⋯": "~", "–": "-", "−": "-", "─": "-", "²": "^2", "Ψ": "Psi"}
"""What is shown where an encoding lacks the signs of our own texts; others show as `\\u` and their number."""


@contextmanager
def streams() -> Generator[None]:
    """Standard output and error that take any text, written to the end when this ends.  BrokenPipeError."""
    register_error("plain", _plain)
    sys.stdout, sys.stderr = (each or open(os.devnull, "w") for each in (sys.stdout, sys.stderr))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="plain")
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _plain(error: UnicodeError) -> tuple[str | bytes, int]:
    assert isinstance(error, UnicodeEncodeError), "streams: a handler for what is written"
    text = error.object[error.start : error.end]
    shown = (PLAIN.get(sign) or sign.encode("ascii", "backslashreplace").decode() for sign in text)
    return "".join(shown), error.end


def as_file() -> None:
    """Has standard output be UTF-8 where it goes to a file or a program: as a file, such text is read back."""
    stream: Any = sys.stdout
    if not stream.isatty() and hasattr(stream, "reconfigure"):
        stream.reconfigure(encoding="utf-8", errors="plain")


def abandon() -> None:
    """Has both streams lead nowhere: Python writes what is left in them when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
