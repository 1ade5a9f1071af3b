"""Output of commands: reports, diagnostics, files; exit statuses.

Standard streams take any text, in whatever encoding, even where nobody reads it to the end.  Files
are made whole or not at all, and never over files that scalec did not write.
"""

import os
import sys
from argparse import ArgumentParser
from codecs import register_error
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.text import Text

    from ..syntax.diagnostics import Diagnostic

PLAN_WRONG = 1
USAGE = 2
BUG = 70  # EX_SOFTWARE of sysexits.h
# as a shell reports a process that SIGINT or SIGPIPE ended
INTERRUPTED, BROKEN_PIPE = 128 + 2, 128 + 13


class UsageError(Exception):
    """A request that cannot be met, or not without harm, however right the plan is."""


def cannot_write(path: Path, error: OSError, instead: str = "") -> UsageError:
    """The error for a file that cannot be written, and what to do `instead`."""
    return UsageError(f"cannot write `{path}`: {(error.strerror or str(error)).lower()}{instead}")


PLAIN = {
    "×": "x",
    "→": "->",
    "·": ".",
    "…": "...",
    "⋯": "~",
    "–": "-",
    "−": "-",
    "─": "-",
    "²": "^2",
    "Ψ": "Psi",
}
"""Replacements for characters of our texts that an encoding lacks; others show as `\\u` and
their number.
"""


@contextmanager
def streams() -> Generator[None]:
    """Standard output and error that take any text, written to the end when this ends.

    BrokenPipeError.
    """
    register_error("plain", _plain)
    # a program without a terminal may start scalec without streams
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="plain")
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _plain(error: UnicodeError) -> tuple[str | bytes, int]:
    assert isinstance(error, UnicodeEncodeError), "cli: a handler for what is written"
    replacement = ""
    for sign in error.object[error.start : error.end]:
        replacement += PLAIN.get(sign) or sign.encode("ascii", "backslashreplace").decode()
    return replacement, error.end


def as_file() -> None:
    """Makes standard output UTF-8 where it goes to a file or a program: scalec reads its files as
    UTF-8.
    """
    stream: Any = sys.stdout
    if not stream.isatty() and hasattr(stream, "reconfigure"):
        stream.reconfigure(encoding="utf-8", errors="plain")


def abandon() -> None:
    """Makes both streams lead nowhere: Python writes the rest of their buffers when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())


# ---- reports and diagnostics

STYLES = (
    r"(?<![\w.:])(?P<cyan>\d[\d,.]*(?: ?(?:%|[KMGTP]i?B|B|[mµ]?s|GPUs?|ranks?|nodes?)\b)?)",
    r"(?P<magenta>\b[\w-]+\.(?:scale|ir|py|json|csv|toml)(?::\d+)?\b)",
    r"`(?P<bold>[^`\n]+)`",
    r"(?m)^(?P<green>ok|equal|fits|verified)\b",
    r"(?m)^(?P<red>does not fit|not verified|differs?|fail)\b",
    r"(?m)^(?P<yellow>warn)\b",
    # the head of a table: columns, above another line
    r"(?:\A|\n\n)(?P<bold>[^\n]*\S {2,}\S[^\n]*)(?=\n\S)",
)
"""Patterns of words that have a style, which the group names; later ones add to earlier ones."""


def show(text: str) -> None:
    """Prints a report, which ends without a line break."""
    from ..syntax.diagnostics import wants_colour

    if not wants_colour(sys.stdout):
        print(text)
        return
    from rich.console import Console

    Console(file=sys.stdout, highlight=False).print(to_styled_text(text), soft_wrap=True)


def to_styled_text(text: str) -> "Text":
    """The same text with styles."""
    from rich.text import Text

    result = Text(text)
    for pattern in STYLES:
        result.highlight_regex(pattern)
    return result


TEXT = "text"
"""The form for people."""


def format_argument(parser: ArgumentParser) -> None:
    """The option of commands whose diagnostics can have another form."""
    help = (
        "the form of errors and warnings; one for machines is all that is printed (default: text)"
    )
    parser.add_argument(
        "--format", choices=(TEXT, "json", "sarif", "github"), default=TEXT, help=help
    )


def tell(diagnostics: "Sequence[Diagnostic]", form: str = TEXT) -> None:
    """Prints diagnostics: for people on standard error, for machines on standard output."""
    if form == TEXT:
        from ..syntax.diagnostics import render, wants_colour

        colour = wants_colour(sys.stderr)
        texts = [f"{render(diagnostic, colour=colour)}\n\n" for diagnostic in diagnostics]
        sys.stderr.write("".join(texts))
        return
    from ..reports.diagnostic_formats import FORMATS

    as_file()
    sys.stdout.write(FORMATS[form](diagnostics))


# ---- files


def put(path: Path, text: str, form: str, mark: str, stream: TextIO | None = None) -> None:
    """Writes a new file, or replaces one with the mark, and says so on `stream`, by default
    standard output.

    Raises UsageError; `form` is the option that names the file.
    """
    check_replaceable(path, text, form, mark)
    replace(path, text, form)
    print(f"wrote {path}", file=stream)


def check_replaceable(path: Path, text: str, form: str, mark: str) -> None:
    """Checks that a file is new, or has the mark of scalec's files.

    Rows of a schedule have no room for the mark, and are there to be edited: files with other rows
    are never replaced.

    Raises UsageError; `form` is the option that names the file.
    """
    try:
        if not (path.exists() or path.is_symlink()):
            return
        if path.is_symlink() or not path.is_file():
            raise UsageError(f"`{path}` is not a plain file: choose another with --{form}")
        content = path.read_bytes()
    except OSError as error:
        raise cannot_write(path, error, f"; choose another file with --{form}") from error
    if content != text.encode() and mark.encode() not in content[:1000]:
        why = "has other rows" if form == "csv" else "was not written by scalec"
        raise UsageError(f"`{path}` {why}: move it away, or choose another file with --{form}")


def replace(path: Path, text: str, form: str) -> None:
    """Writes a file, all of it or nothing.  Raises UsageError."""
    draft = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        with draft.open("xb") as file:
            file.write(text.encode())
        draft.replace(path)
    except OSError as error:
        raise cannot_write(path, error, f"; choose another file with --{form}") from error
    finally:
        with suppress(OSError):
            draft.unlink()
