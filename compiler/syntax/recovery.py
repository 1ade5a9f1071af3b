"""Reading on after a mistake of syntax: the part of the text to leave out, so that the remaining
text can be read.

The part is as small as possible, up to the border of an entry, a statement or a block; places in
the remaining text stay the same.  Non-goals: the meaning of the part; its words are in doubt, and
nothing is reported that may be missing because of them.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, cast

from lark import Token

from .diagnostics import Diagnostic
from .limits import WORD, pairing
from .source import Source, Span

Part = tuple[int, int]
"""Offsets of a part of a text, its end exclusive."""

BETWEEN = {"over", "as", "via", "to", "by", "from", "pad", "every"}
"""Words of the language in rules, routes and settings, and in messages about these."""

_NAME = re.compile(r"(?<!\w)[A-Za-z_]\w*")
_COMMENT = re.compile(r"#[^\n]*")


def blank_out(text: str, part: Part) -> str:
    """The text with spaces in place of a part, but for line ends."""
    start, end = part
    return text[:start] + re.sub(r"[^\n]", " ", text[start:end]) + text[end:]


def words(text: str, part: Part) -> set[str]:
    """The names in a part of a text, without comments and the words between names."""
    return {*_NAME.findall(_COMMENT.sub("", text[part[0] : part[1]]))} - BETWEEN


def offset(span: Span) -> int:
    """The offset of a span's beginning in its text."""
    lines_before = span.text.split("\n")[: span.line - 1]
    return sum(len(line) + 1 for line in lines_before) + span.column - 1


# ---- entries and statements


def entry_around(text: str, stop: int, stack: Sequence[Any], reach: Callable[[str], int]) -> Part:
    """The entry that the parser had begun when it stopped at the offset `stop`; `stack` has the
    tokens and nodes that it had put together.

    `reach` gives the offset that the parser comes to in a text.  An entry ends with its line.  If
    the parser stopped in a later line than the entry's last words, the next entry may begin in this
    line, so it is left out only if need be.
    """
    start = min(_begin(stack, stop), stop)
    before = text.rfind("\n", start, stop)
    if before > start and text[start:before].strip():
        shorter = start, before
        if reach(blank_out(text, shorter)) > stop:
            return shorter
    return start, _end(text, start, stop)


def _begin(stack: Sequence[Any], stop: int) -> int:
    """The offset of the unfinished entry: after the last open brace, and after all entries that
    are complete.
    """
    for part in stack[_innermost(stack) :]:
        first = part
        if isinstance(part, tuple):
            first = cast(tuple[Any, ...], part)[0]
        if isinstance(first, Token):
            return first.start_pos or 0
        if hasattr(first, "span"):
            return offset(first.span)
    return stop


def _innermost(stack: Sequence[Any]) -> int:
    """The place in the stack after the last brace that is open: a branch may have closed one
    before its `else`.
    """
    places: list[int] = []
    for place, part in enumerate(stack, start=1):
        kind = part.type if isinstance(part, Token) else ""
        if kind == "LBRACE":
            places.append(place)
        elif kind == "RBRACE":
            places.pop()
    return places[-1] if places else 0


def _end(text: str, start: int, stop: int) -> int:
    """The first line end from `stop` on where no bracket is open, or the end of the block."""
    depth = 0
    for word in WORD.finditer(text, start):
        line = text.find("\n", max(stop, start), word.start())
        if not depth and line >= 0 and line < word.start():
            return line
        if word[0] in ")]}":
            depth -= 1
            if depth < 0:
                return max(word.start(), start + 1)
        depth += word[0] in "([{"
        stop = max(stop, word.end())
    line = text.find("\n", max(stop, start))
    return line if line >= 0 else len(text)


def block_below(text: str, part: Part) -> Part:
    """The part with the lines that continue it: one line after a `\\`, all lines further in after
    a `:` at the margin.
    """
    start, end = part
    if text[start:end].endswith("\\"):
        return start, line_around(text, end + 1)[1]
    if text[start:end].rstrip().endswith(":") and text[line_around(text, start)[0]].isalpha():
        below = re.compile(r"(\n([ \t].*)?)*").match(text, end)
        if below:
            return start, below.end()
    return part


# ---- brackets


def find_unpaired_part(source: Source, mistake: Diagnostic) -> Part:
    """The part to leave out of a text whose brackets or quotes do not pair: a line if that
    helps, a block, or all.
    """
    text, place = source.text, offset(mistake.span)
    for part in _suspects(text, mistake):
        if text[part[0] : part[1]].strip():
            next_mistake = pairing(Source(source.path, blank_out(text, part)))
            if next_mistake is None or offset(next_mistake.span) > place:
                return part
    return 0, len(text)


def _suspects(text: str, mistake: Diagnostic) -> Iterator[Part]:
    """Parts to leave out, the smallest first."""
    place = offset(mistake.span)
    places_of_notes = [offset(note.span) for note in mistake.notes if note.span]
    if "closes nothing" in mistake.message:
        for bracket in (*places_of_notes[1:], place):
            yield bracket, bracket + 1
    for bracket in (*places_of_notes[:1], place):
        yield line_around(text, bracket)
    for bracket in (place, *places_of_notes):
        yield _item(text, bracket)


def line_around(text: str, place: int) -> Part:
    """The line of an offset, without its end."""
    end = text.find("\n", place)
    if end < 0:
        end = len(text)
    return text.rfind("\n", 0, place) + 1, end


def _item(text: str, place: int) -> Part:
    """The lines around an offset from one that begins with a word at its margin to the next such
    line.
    """
    margins = [0, *(match.start() for match in re.finditer(r"(?m)^\w", text)), len(text)]
    for begin, end in pairwise(margins[:-1]):
        if end > place:
            return begin, end
    return margins[-2], margins[-1]
