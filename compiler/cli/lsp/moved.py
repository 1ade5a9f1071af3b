"""Places in two versions of a text, one of which was typed after the other."""

import re
from functools import cached_property, lru_cache

from attrs import frozen

from ...syntax.source import Source, Span


@frozen
class Moved:
    """Two versions of a text that differ in one stretch, as while one types."""

    old: Source
    new: Source

    @cached_property
    def _edited(self) -> tuple[int, int]:
        """How many characters are equal at the beginning, and how many at the end."""
        old, new = self.old.text, self.new.text
        if old == new:
            return len(old), 0
        start = _common(old, new)
        return start, _common(old[start:][::-1], new[start:][::-1])

    def before(self, line: int, column: int) -> tuple[int, int] | None:
        """The place of a place of the new text in the old one."""
        found = self._mapped(self.new, self.old, line, column)
        return found and (found.line, found.column)

    def back(self, span: Span) -> Span | None:
        """The old span of a new one."""
        return self._both(self.new, self.old, span)

    def after(self, span: Span) -> Span | None:
        """The new span of an old one."""
        return self._both(self.old, self.new, span)

    def now(self, line: int) -> int | None:
        """The number of an old line in the new text."""
        found = self._mapped(self.old, self.new, line, len(self.old.text))
        return found and found.line

    def _both(self, one: Source, other: Source, span: Span) -> Span | None:
        if not span.line or one.text == other.text:
            return span if span.line else other.whole()
        first = self._mapped(one, other, span.line, span.column, begins=True)
        last = self._mapped(one, other, span.end_line, span.end_column)
        return first.to(last) if first and last else None

    def _mapped(
        self, one: Source, other: Source, line: int, column: int, *, begins: bool = False
    ) -> Span | None:
        """A place; where something begins, what was put in just before it is not a part of it."""
        start, tail = self._edited
        at = offset(one.text, line, column)
        is_after = at >= len(one.text) - tail
        if at > start and not is_after:
            return None
        at += (len(other.text) - len(one.text)) * (is_after and (begins or at > start))
        return other.span(at, at)


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (own, its) in pairs if own != its), min(len(one), len(other)))


def offset(text: str, line: int, column: int) -> int:
    """The offset of a place; beyond the end of a line, or of the text, that of the end."""
    ends = _line_ends(text)
    return (
        min((ends[line - 2] + 1 if line > 1 else 0) + column - 1, ends[line - 1])
        if line <= len(ends)
        else len(text)
    )


@lru_cache(maxsize=8)
def _line_ends(text: str) -> tuple[int, ...]:
    """The offset of the end of each line."""
    return (*(found.start() for found in re.finditer("\n", text)), len(text))
