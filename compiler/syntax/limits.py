"""Checks of a text before any grammar sees it: encoding, size, brackets and how deep they nest.

No text costs more than a bounded time, and a missing bracket is reported where the other one of its
pair is.
"""

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path

from ...formats.known import FETCH, Ends, Format, format_of
from .diagnostics import Diagnostic, Note, PlanError, nearest, wrong
from .source import Source, Span

MAX_BYTES = 64 * 1024
MAX_WRITTEN_BYTES = 16 << 20
"""The limit of texts by scalec itself: IR text and programs list each action of a pipeline,
accounts each message.
"""
MAX_DEPTH = 64

_IN_FOLDERS = ("train.py", "config.json")
"""Files that scalec reads, by name: a compiled program, the configuration of a model."""

_CLOSING = {"(": ")", "[": "]", "{": "}"}
WORD = re.compile(r'#[^\n]*|"(?:[^"\\\n]|\\[^\n])*"?|[()\[\]{}]')
"""Comments, strings, and brackets outside of these."""

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def load(path: Path, span: Span | None = None, most: int = MAX_BYTES) -> Source:
    """The text of a file of at most `most` bytes; `span` is the place that names the file, if any.

    Raises PlanError where it cannot be read, is too large or not UTF-8.
    """
    place = span or Source(str(path), "").whole()
    try:
        if not path.is_file():
            message = f"there is no file `{path}`"
            if path.exists():
                message = f"`{path}` is not a file"
            raise wrong("E0101", message, place, help="" if span else _help_for_path(path))
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise wrong("E0101", f"`{path}` cannot be read: {reason}", place) from None
    if foreign := _foreign(content):
        help = FETCH if foreign.word == "lfs" else ""
        message = f"`{path}` is {foreign.name}, which is not read here"
        raise wrong("E0101", message, place, help=help)
    if len(content) > most:
        raise _too_large(str(path), place, most)
    try:
        return Source(str(path), content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        where = f"byte 0x{content[error.start]:02x} on line {line}"
        raise wrong("E0101", f"`{path}` is not UTF-8: {where}", place) from None


def _foreign(content: bytes) -> Format | None:
    """The format of a content that is surely neither a plan nor another text that scalec reads;
    else None.
    """
    format = format_of(Ends.from_content(content))
    # scalec reads some texts in JSON
    if format is None or format.word in ("json", "jsonl"):
        return None
    return format


def _help_for_path(path: Path) -> str:
    """Help where a path is no file: the file in the folder that scalec reads, or the neighbour
    whose name the path misspells.
    """
    with suppress(OSError):
        if path.is_dir():
            for name in _IN_FOLDERS:
                if (path / name).is_file():
                    return f"did you mean `{path / name}`?"
            return ""
        neighbours = islice(path.parent.iterdir(), 1000)
        names = [neighbour.name for neighbour in neighbours if neighbour.is_file()]
        if near := nearest(path.name, names):
            return f"did you mean `{path.with_name(near)}`?"
    return ""


Reader = Callable[[Path, Span], Source]
"""Reads the file that a place names, as `load` does, or as an editor has it.  Raises PlanError."""


def check(source: Source) -> None:
    """Raises PlanError where the text is too large, holds a NUL, or has brackets nested too
    deep.
    """
    if len(source.text) > MAX_BYTES:
        raise _too_large(source.path, source.whole())
    nul = source.text.find("\0")
    if nul >= 0:
        raise wrong(
            "E0102", "a plan is text, but this is a NUL character", source.span(nul, nul + 1)
        )
    pairing(source)


def pairing(source: Source) -> Diagnostic | None:
    """The first mistake in how brackets and quotes pair, if any.

    Raises PlanError where brackets nest too deep.
    """
    try:
        _pair(source)
    except PlanError as error:
        if error.diagnostics[0].code == "E0102":
            raise
        return error.diagnostics[0]
    return None


def _pair(source: Source) -> None:
    """Pairs brackets by their offsets; spans, which take time, are only made for what is
    reported.
    """
    text = source.text
    opened: list[int] = []
    pairs: list[tuple[int, int]] = []
    for word in WORD.finditer(text):
        offset = word.start()
        if word[0] in _CLOSING:
            opened.append(offset)
            if len(opened) > MAX_DEPTH:
                message = f"brackets nest deeper than {MAX_DEPTH}"
                raise wrong("E0102", message, _bracket(source, offset))
        elif word[0] in _CLOSING.values():
            if not opened:
                message, notes = f"`{word[0]}` closes nothing", _suspect(source, pairs)
                raise wrong("E0103", message, _bracket(source, offset), notes=notes)
            opening = opened.pop()
            pairs.append((opening, offset))
            bracket = text[opening]
            if word[0] != (wanted := _CLOSING[bracket]):
                message = f"expected `{wanted}`, found `{word[0]}`"
                note = Note(_bracket(source, opening), f"to close this `{bracket}`")
                raise wrong("E0103", message, _bracket(source, offset), notes=(note,))
        elif word[0].startswith('"') and not _STRING.fullmatch(word[0]):
            help = 'a string is on one line, between `"` and `"`'
            raise wrong("E0105", "this string does not end", source.span(*word.span()), help=help)
    if opened:
        message = f"this `{text[opened[-1]]}` is never closed"
        raise wrong("E0103", message, _bracket(source, opened[-1]), notes=_suspect(source, pairs))


def _suspect(source: Source, pairs: Iterable[tuple[int, int]]) -> tuple[Note, ...]:
    """Notes on the first pair whose indentation speaks against it: there a bracket is probably
    missing, or too many.
    """

    def line(offset: int) -> tuple[int, int]:
        """The beginning of the line of an offset, and how far the line is indented."""
        start = source.text.rfind("\n", 0, offset) + 1
        before = source.text[start : offset + 1]
        return start, len(before) - len(before.lstrip())

    for opened, closed in pairs:
        start, indent = line(closed)
        if closed == start + indent and indent != line(opened)[1]:
            closes = Note(_bracket(source, closed), "which closes here, by indentation not its own")
            return Note(_bracket(source, opened), "perhaps it is this one"), closes
    return ()


def _bracket(source: Source, offset: int) -> Span:
    return source.span(offset, offset + 1)


def _too_large(path: str, place: Span, most: int = MAX_BYTES) -> PlanError:
    return wrong("E0102", f"`{path}` is larger than {most // 1024} KiB", place)
