"""Checks of a text before any grammar sees it: encoding, size, brackets and how deep they nest.

No text, however made, costs more than a bounded time, and a bracket forgotten is reported where it was opened.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path

from .diagnostics import Diagnostic, Note, PlanError, nearest, wrong
from .source import Source, Span

MAX_BYTES = 64 * 1024
MAX_WRITTEN_BYTES = 16 << 20
"""The limit of texts by scalec itself: IR text and programs list each action of a pipeline, accounts each message."""
MAX_DEPTH = 64

_IN_FOLDERS = ("train.py", "config.json")
"""Files that scalec reads, by name: a compiled program, the configuration of a model."""

_CLOSING = {"(": ")", "[": "]", "{": "}"}
WORD = re.compile(r'#[^\n]*|"(?:[^"\\\n]|\\[^\n])*"?|[()\[\]{}]')
"""Comments, strings, and brackets outside of these."""

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def load(path: Path, at: Span | None = None, most: int = MAX_BYTES) -> Source:
    """The text of a file of at most `most` bytes; `at` is the place that names the file, if one does.

    Raises PlanError where it cannot be read, is too large or not UTF-8.
    """
    place = at or Source(str(path), "").whole()
    try:
        if not path.is_file():
            message = f"`{path}` is not a file" if path.exists() else f"there is no file `{path}`"
            raise wrong("E0101", message, place, help="" if at else _meant(path))
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise wrong("E0101", f"`{path}` cannot be read: {(error.strerror or str(error)).lower()}", place) from None
    if len(content) > most:
        raise _too_large(str(path), place, most)
    try:
        return Source(str(path), content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        where = f"byte 0x{content[error.start]:02x} on line {line}"
        raise wrong("E0101", f"`{path}` is not UTF-8: {where}", place) from None


def _meant(path: Path) -> str:
    """Help where a path is no file: the one in the folder that scalec reads, or the neighbour that it misspells."""
    with suppress(OSError):
        if path.is_dir():
            found = [each for name in _IN_FOLDERS if (each := path / name).is_file()]
            return f"did you mean `{found[0]}`?" if found else ""
        if near := nearest(path.name, [each.name for each in islice(path.parent.iterdir(), 1000) if each.is_file()]):
            return f"did you mean `{path.with_name(near)}`?"
    return ""


Reader = Callable[[Path, Span], Source]
"""Reads the file that a place names, as `load` does, or as an editor has it.  Raises PlanError."""


def check(source: Source) -> None:
    """Raises PlanError where the text is too large, holds a NUL, or has brackets nested too deep."""
    if len(source.text) > MAX_BYTES:
        raise _too_large(source.path, source.whole())
    nul = source.text.find("\0")
    if nul >= 0:
        raise wrong("E0102", "a plan is text, but this is a NUL character", source.span(nul, nul + 1))
    pairing(source)


def pairing(source: Source) -> Diagnostic | None:
    """The first mistake in how brackets and quotes pair, if any.  Raises PlanError where brackets nest too deep."""
    try:
        _Brackets(source).check()
    except PlanError as error:
        if error.diagnostics[0].code == "E0102":
            raise
        return error.diagnostics[0]
    return None


class _Brackets:
    """Pairs brackets by their offsets; spans are only made for what is reported."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._open: list[int] = []
        self._pairs: list[tuple[int, int]] = []

    def check(self) -> None:
        for word in WORD.finditer(self._source.text):
            if word[0] in _CLOSING:
                self._opens(word.start())
            elif word[0] in _CLOSING.values():
                self._closes(word.start(), word[0])
            elif word[0].startswith('"') and not _STRING.fullmatch(word[0]):
                help = 'a string is on one line, between `"` and `"`'
                raise wrong("E0105", "this string does not end", self._source.span(*word.span()), help=help)
        if self._open:
            opened = self._open[-1]
            raise wrong(
                "E0103", f"this `{self._at(opened)}` is never closed", self._span(opened), notes=self._suspect()
            )

    def _opens(self, at: int) -> None:
        self._open.append(at)
        if len(self._open) > MAX_DEPTH:
            raise wrong("E0102", f"brackets nest deeper than {MAX_DEPTH}", self._span(at))

    def _closes(self, at: int, bracket: str) -> None:
        if not self._open:
            raise wrong("E0103", f"`{bracket}` closes nothing", self._span(at), notes=self._suspect())
        opened = self._open.pop()
        wanted = _CLOSING[self._at(opened)]
        if bracket != wanted:
            note = Note(self._span(opened), f"to close this `{self._at(opened)}`")
            raise wrong("E0103", f"expected `{wanted}`, found `{bracket}`", self._span(at), notes=(note,))
        self._pairs.append((opened, at))

    def _suspect(self) -> list[Note]:
        """The first pair whose indentation speaks against it: probably where a bracket is missing or too many."""
        for opened, closed in self._pairs:
            start, indent = self._line(closed)
            if closed == start + indent and indent != self._line(opened)[1]:
                closes = Note(self._span(closed), "which closes here, by indentation not its own")
                return [Note(self._span(opened), "perhaps it is this one"), closes]
        return []

    def _line(self, at: int) -> tuple[int, int]:
        """Where the line of an offset begins, and how far it is indented."""
        start = self._source.text.rfind("\n", 0, at) + 1
        before = self._source.text[start : at + 1]
        return start, len(before) - len(before.lstrip())

    def _at(self, at: int) -> str:
        return self._source.text[at]

    def _span(self, at: int) -> Span:
        return self._source.span(at, at + 1)


def _too_large(path: str, place: Span, most: int = MAX_BYTES) -> PlanError:
    return wrong("E0102", f"`{path}` is larger than {most // 1024} KiB", place)
