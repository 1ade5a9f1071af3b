"""Standard streams that take any text, in whatever encoding, though nobody reads it to the end; exit statuses."""

import os
import sys
from codecs import register_error
from collections.abc import Generator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any

PLAN_WRONG = 1
USAGE = 2
BUG = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED, BROKEN_PIPE = 128 + 2, 128 + 13  # as a shell reports a process that SIGINT or SIGPIPE ended


class UsageError(Exception):
    """A request that cannot be met, or not without harm, however right the plan is."""


def cannot_write(path: Path, error: OSError, instead: str = "") -> UsageError:
    """The error for a file that cannot be written, and what to do `instead`."""
    return UsageError(f"cannot write `{path}`: {(error.strerror or str(error)).lower()}{instead}")


PLAIN = {"×": "x", "→": "->", "·": ".", "…": "...", "⋯": "~", "–": "-", "−": "-", "─": "-", "²": "^2", "Ψ": "Psi"}
"""Replacements for characters of our texts that an encoding lacks; others show as `\\u` and their number."""


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
