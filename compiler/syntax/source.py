"""Texts and places in them."""

import re
from pathlib import PurePath

from attrs import field, frozen


@frozen
class Span:
    """A stretch of a text: lines and columns count from 1, the end is exclusive; line 0 is the file
    as a whole.

    `text` is the whole text, so that an excerpt shows the text that was read even if the file has
    changed since.  `shown` is the file's name in short where it is not the last part of the path.
    """

    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    text: str = field(default="", eq=False, repr=False)
    shown: str = field(default="", eq=False, repr=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def file(self) -> str:
        """The file's name in short."""
        return self.shown or PurePath(self.path).name

    @property
    def start(self) -> tuple[int, int]:
        """The line and the column of the first character."""
        return self.line, self.column

    @property
    def words(self) -> str:
        """The text that the span covers in its first line; "" where the text is not known."""
        if not self.line or not self.text:
            return ""
        line = self.text.split("\n")[self.line - 1]
        if self.end_line != self.line:
            return line[self.column - 1 :]
        return line[self.column - 1 : self.end_column - 1]

    @property
    def names(self) -> set[str]:
        """The names in all lines of the span."""
        lines = self.text.split("\n")[max(self.line - 1, 0) : self.end_line]
        return {*re.findall(r"[A-Za-z_]\w*", "\n".join(lines))}

    def to(self, last: "Span") -> "Span":
        """From the beginning of this span to the end of `last`."""
        return Span(
            self.path, self.line, self.column, last.end_line, last.end_column, self.text, self.shown
        )


@frozen
class Source:
    """A text, its path, and `shown` as spans have it."""

    path: str
    text: str = field(repr=False)
    shown: str = field(default="", repr=False)

    def whole(self) -> Span:
        """The text as a whole."""
        return Span(self.path, 0, 0, 0, 0, self.text, self.shown)

    def span(self, start: int, end: int) -> Span:
        """The span between two offsets."""
        return Span(self.path, *self._position(start), *self._position(end), self.text, self.shown)

    def _position(self, offset: int) -> tuple[int, int]:
        line_start = self.text.rfind("\n", 0, offset) + 1
        return self.text.count("\n", 0, offset) + 1, offset - line_start + 1


def is_ir(text: str) -> bool:
    """Whether `text` is IR text and not a plan: a line begins `program NAME after PASS`."""
    return any(line.startswith("program ") for line in text.splitlines())
