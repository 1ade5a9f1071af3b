"""Diagnostics: errors and warnings about a plan, shown the way rustc does."""

import os
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from attrs import evolve, frozen

from .codes import CONSTANT, NAME, get_code
from .source import Span


@frozen
class Note:
    """Something else worth knowing; with a span, another place that has to do with the mistake."""

    span: Span | None
    text: str


@frozen
class Diagnostic:
    """One mistake, or a warning."""

    code: str
    message: str
    span: Span
    label: str = ""
    notes: tuple[Note, ...] = ()
    help: str = ""

    @property
    def severity(self) -> str:
        """Whether it is an error or a warning."""
        return "warning" if self.code.startswith("W") else "error"

    def __str__(self) -> str:
        return render(self)


class PlanError(Exception):
    """The plan is wrong; holds at least one diagnostic, ordered by position."""

    def __init__(self, diagnostics: Sequence[Diagnostic]) -> None:
        assert diagnostics, "diagnostics: a PlanError without a diagnostic"
        self.diagnostics = tuple(sorted(diagnostics, key=lambda mistake: _position(mistake.span)))
        super().__init__(*self.diagnostics)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.diagnostics))


def _position(span: Span) -> tuple[str, int, int]:
    """The key that sorts places: by file, line and column."""
    return span.path, span.line, span.column


def wrong(
    code: str,
    message: str,
    span: Span,
    label: str = "",
    help: str = "",
    *,
    notes: Sequence[Note] = (),
) -> PlanError:
    """The error of one mistake."""
    return PlanError([Diagnostic(code, message, span, label, tuple(notes), help)])


def relocate(mistake: Diagnostic, text: str) -> Diagnostic:
    """The mistake with its places in another text that has the same lines and columns."""
    notes: list[Note] = []
    for note in mistake.notes:
        notes.append(evolve(note, span=note.span and evolve(note.span, text=text)))
    return evolve(mistake, span=evolve(mistake.span, text=text), notes=tuple(notes))


class Unknown(Exception):
    """Something cannot be known, because of a mistake that has been reported."""


PLACES = 3
"""The most other places that are shown."""

_PART = re.compile("_[0-9]+(?=`)")
_QUOTED = re.compile("`[^`]*`")
_NAME = re.compile(r"[A-Za-z_]\w*")


class Diagnostics:
    """Collects the mistakes that one step finds, and the words whose meaning is in doubt because of
    them.

    `in_part` are sections with a part that is in doubt, and `used` are words that may have a use in
    such a part.  `count` is the number of mistakes, unreported ones too.
    """

    def __init__(self) -> None:
        # by a key that is the same for all parts of a repeat with branches
        self._mistakes: dict[object, Diagnostic] = {}
        self._elsewhere: dict[object, list[Span]] = {}
        self.count = 0
        self.doubtful: set[str] = set()
        self.in_part: set[str] = set()
        self.used: set[str] = set()

    def error(
        self,
        code: str,
        message: str,
        span: Span,
        label: str = "",
        *,
        notes: Sequence[Note] = (),
        help: str = "",
    ) -> None:
        """Adds one mistake."""
        self.tell(Diagnostic(code, message, span, label, tuple(notes), help))

    def doubt(self, *words: str, section: str = "") -> None:
        """Puts the meaning of words in doubt, and a part of a section."""
        self.doubtful.update(words)
        self.in_part.update(filter(None, [section]))

    def tell(self, mistake: Diagnostic) -> None:
        """Adds one mistake, unless an equal one was added, or it may follow from others."""
        self.count += 1
        if self._follows(mistake):
            return
        key = _same(mistake)
        first = self._mistakes.setdefault(key, mistake)
        if first.span != mistake.span and get_code(mistake.code).once_for == NAME:
            self._elsewhere.setdefault(key, []).append(mistake.span)

    def add(self, error: PlanError) -> None:
        """Adds the mistakes of an error that was caught so that the search can go on."""
        for mistake in error.diagnostics:
            self.tell(mistake)

    @contextmanager
    def catch(self) -> Generator[None]:
        """Adds the mistakes that are raised inside; code after it can go on without the inside."""
        try:
            yield
        except PlanError as error:
            self.add(error)
        except Unknown:
            pass

    def __bool__(self) -> bool:
        return bool(self._mistakes)

    @property
    def codes(self) -> set[str]:
        """The codes of all mistakes."""
        return {mistake.code for mistake in self._mistakes.values()}

    def check(self) -> None:
        """Raises PlanError with all mistakes, if there are any."""
        if not self._mistakes:
            return
        mistakes: list[Diagnostic] = []
        for key, mistake in self._mistakes.items():
            mistakes.append(_with_places(mistake, self._elsewhere.get(key, ())))
        raise PlanError(mistakes)

    def _follows(self, mistake: Diagnostic) -> bool:
        """Whether a mistake may follow from others: then it is not reported."""
        code = get_code(mistake.code)
        if code.follows is None:
            return False
        words: set[str] = set()
        for quoted in _QUOTED.findall(mistake.message):
            words.update(_NAME.findall(quoted))
        doubtful = self.doubtful
        if code.unused:
            doubtful = self.doubtful | self.used
        return not words.isdisjoint(doubtful) or not self.in_part.isdisjoint(code.follows)


def _same(mistake: Diagnostic) -> object:
    """The key that all mistakes share that are reported as one."""
    message = _PART.sub("", mistake.message)
    once_for = get_code(mistake.code).once_for
    if once_for == NAME:
        return _QUOTED.findall(message)[0]
    if once_for == CONSTANT:
        return mistake.code, None, message
    return mistake.code, mistake.span, message


def _with_places(mistake: Diagnostic, places: Sequence[Span]) -> Diagnostic:
    """A mistake of a name, with the other places where the name is."""
    in_order = sorted({*places}, key=_position)
    notes = [Note(span, "and here") for span in in_order[:PLACES]]
    if others := in_order[PLACES:]:
        noun = "place" if len(others) == 1 else "places"
        notes.append(Note(None, f"and at {len(others)} more {noun}"))
    return evolve(mistake, notes=(*mistake.notes, *notes))


def nearest(word: str, choices: Iterable[str]) -> str:
    """The choice that is misspelt as `word`, in upper or lower case; "" if none is near it."""
    from difflib import get_close_matches

    folded = {choice.casefold(): choice for choice in choices}
    near = get_close_matches(word.casefold(), list(folded), n=1)
    return folded[near[0]] if near else ""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Help for a misspelt word; "" if no choice is near it."""
    near = nearest(word, choices)
    return f"did you mean `{near}`?" if near else ""


def listing(words: Iterable[str]) -> str:
    """Words in backticks, separated by commas."""
    return ", ".join(f"`{word}`" for word in words)


# ---- showing

_STYLES = {
    "error": "\x1b[1;31m",
    "warning": "\x1b[1;33m",
    "strong": "\x1b[1m",
    "gutter": "\x1b[1;34m",
    "help": "\x1b[1;32m",
}


def wants_colour(stream: TextIO) -> bool:
    """Whether to colour the text of `stream`: a terminal, and NO_COLOR unset (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def render(diagnostic: Diagnostic, *, colour: bool = False) -> str:
    """The diagnostic as lines of text, with the lines of the plan that it is about."""
    return "\n".join(_Renderer(diagnostic, colour).lines())


@frozen
class _Mark:
    """An underline below a line of the plan."""

    span: Span
    sign: str
    label: str
    style: str


class _Renderer:
    def __init__(self, diagnostic: Diagnostic, colour: bool) -> None:
        self._diagnostic = diagnostic
        self._colour = colour
        self._marks = [_Mark(diagnostic.span, "^", diagnostic.label, diagnostic.severity)]
        for note in diagnostic.notes:
            if note.span:
                self._marks.append(_Mark(note.span, "-", note.text, "gutter"))
        self._width = len(str(max(mark.span.line for mark in self._marks)))

    def lines(self) -> Iterator[str]:
        diagnostic = self._diagnostic
        head = self._paint(f"{diagnostic.severity}[{diagnostic.code}]", diagnostic.severity)
        yield head + self._paint(f": {diagnostic.message}", "strong")
        marks_by_path: dict[str, list[_Mark]] = {}
        for mark in self._marks:
            marks_by_path.setdefault(mark.span.path, []).append(mark)
        for path, marks in marks_by_path.items():
            arrow = "-->" if path == diagnostic.span.path else ":::"
            yield from self._excerpt(arrow, marks)
        notes = [note.text for note in diagnostic.notes if not note.span]
        if notes or diagnostic.help:
            yield self._gutter("|")
        for text in notes:
            yield from self._remark("note", text, "strong")
        if diagnostic.help:
            yield from self._remark("help", diagnostic.help, "help")

    def _excerpt(self, arrow: str, marks: list[_Mark]) -> Iterator[str]:
        first = marks[0].span
        place = f"{first.path}:{first.line}:{first.column}" if first.line else first.path
        yield " " * self._width + self._paint(arrow, "gutter") + f" {_printable(place)}"
        if not first.line or not first.text:
            return
        yield self._gutter("|")
        before = 0
        for number in sorted({mark.span.line for mark in marks}):
            if before and number > before + 1:
                yield self._paint("...", "gutter")
            before = number
            line = _printable(first.text.split("\n")[number - 1])
            yield f"{self._gutter('|', number)} {line}".rstrip()
            for mark in marks:
                if mark.span.line == number:
                    yield self._underline(mark, line)

    def _underline(self, mark: _Mark, line: str) -> str:
        """The line below one of the plan, with the signs and the label of a mark."""
        span = mark.span
        end = span.end_column
        if span.end_line != span.line:
            end = len(line.rstrip()) + 1
        signs = mark.sign * max(1, end - span.column)
        underline = self._paint(f"{signs} {mark.label}".rstrip(), mark.style)
        return f"{self._gutter('|')} {' ' * (span.column - 1)}{underline}"

    def _gutter(self, sign: str, number: int | str = "") -> str:
        return self._paint(f"{number:>{self._width}} {sign}", "gutter")

    def _remark(self, kind: str, text: str, style: str) -> Iterator[str]:
        head, *more = text.split("\n")
        yield f"{self._gutter('=')} {self._paint(kind, style)}: {_printable(head)}"
        indent = " " * (self._width + len(kind) + 5)
        for line in more:
            yield indent + _printable(line)

    def _paint(self, text: str, style: str) -> str:
        text = _printable(text)
        return f"{_STYLES[style]}{text}\x1b[0m" if self._colour else text


def _printable(line: str) -> str:
    """The line without characters that would move the cursor: one column for each character."""
    return "".join(character if character.isprintable() else " " for character in line)
