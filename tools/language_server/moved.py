"""Places in two versions of a text: an older one, and one that was typed later."""

import re
from functools import cached_property, lru_cache

from attrs import frozen

from ...compiler.syntax.source import Source, Span


@frozen
class TextChange:
    """Two versions of a text that differ in one stretch, as while one types."""

    old: Source
    new: Source

    @cached_property
    def _edited(self) -> tuple[int, int]:
        """How many characters are equal at the beginning, and how many at the end."""
        old, new = self.old.text, self.new.text
        if old == new:
            return len(old), 0
        start = _common_prefix_length(old, new)
        return start, _common_prefix_length(old[start:][::-1], new[start:][::-1])

    def before(self, line: int, column: int) -> tuple[int, int] | None:
        """The place in the old text, as line and column, of a place of the new text."""
        place = self._mapped(self.new, self.old, line, column)
        return place and (place.line, place.column)

    def back(self, span: Span) -> Span | None:
        """The old span of a new one."""
        return self._both(self.new, self.old, span)

    def after(self, span: Span) -> Span | None:
        """The new span of an old one."""
        return self._both(self.old, self.new, span)

    def now(self, line: int) -> int | None:
        """The number of an old line in the new text."""
        place = self._mapped(self.old, self.new, line, len(self.old.text))
        return place and place.line

    def _both(self, one: Source, other: Source, span: Span) -> Span | None:
        if not span.line:
            return other.whole()
        if one.text == other.text:
            return span
        first = self._mapped(one, other, span.line, span.column, begins=True)
        last = self._mapped(one, other, span.end_line, span.end_column)
        return first.to(last) if first and last else None

    def _mapped(
        self, one: Source, other: Source, line: int, column: int, *, begins: bool = False
    ) -> Span | None:
        """The place in `other` of a place of `one`; None where the edit removed it.

        Where something `begins` there, a text that was typed just before it is not a part of it.
        """
        start, tail = self._edited
        index = offset(one.text, line, column)
        is_after = index >= len(one.text) - tail
        if index > start and not is_after:
            return None
        if is_after and (begins or index > start):
            index += len(other.text) - len(one.text)
        return other.span(index, index)


def _common_prefix_length(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    for index, (character, other_character) in enumerate(zip(one, other, strict=False)):
        if character != other_character:
            return index
    return min(len(one), len(other))


def offset(text: str, line: int, column: int) -> int:
    """The offset of a place; beyond the end of a line, or of the text, the offset of the end."""
    ends = _line_ends(text)
    if line > len(ends):
        return len(text)
    start = ends[line - 2] + 1 if line > 1 else 0
    return min(start + column - 1, ends[line - 1])


@lru_cache(maxsize=8)
def _line_ends(text: str) -> tuple[int, ...]:
    """The offset of the end of each line."""
    return (*(newline.start() for newline in re.finditer("\n", text)), len(text))
