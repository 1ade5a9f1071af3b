"""Reading on after a mistake of syntax: which part of the text is left out, so that the rest can be
read.

Purpose: as little as possible, up to the border of an entry, a statement or a block; places in the
rest stay theirs.  Non-goals: what the part was meant to be; its words are in doubt, and nothing is
said of what lacks them.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from lark import Token

from .diagnostics import Diagnostic
from .limits import WORD, pairing
from .source import Source, Span

Part = tuple[int, int]
"""Offsets of a part of a text, its end exclusive."""

BETWEEN = {"over", "as", "via", "to", "by", "from", "pad", "every"}
"""Words of the language that are in rules, routes and settings, and in messages about these."""

_NAME = re.compile(r"(?<!\w)[A-Za-z_]\w*")
_COMMENT = re.compile(r"#[^\n]*")


def blanked(text: str, part: Part) -> str:
    """The text with spaces in place of a part, but for line ends."""
    start, end = part
    return text[:start] + re.sub(r"[^\n]", " ", text[start:end]) + text[end:]


def words(text: str, part: Part) -> set[str]:
    """The names in a part of a text, without comments and the words between names."""
    return {*_NAME.findall(_COMMENT.sub("", text[part[0] : part[1]]))} - BETWEEN


def offset(span: Span) -> int:
    """Where a span begins in its text."""
    return sum(len(line) + 1 for line in span.text.split("\n")[: span.line - 1]) + span.column - 1


# ---- entries and statements


def entry_around(text: str, at: int, stack: Sequence[Any], reach: Callable[[str], int]) -> Part:
    """The entry that the parser had begun where it stopped at `at`, `stack` being what it had put
    together.

    `reach` says how far the parser comes in a text.  An entry ends with its line; where it stopped
    in a later line than that of the entry's last words, in which the next entry may begin, that
    line is left out only if need be.
    """
    start = min(_begin(stack, text, at), at)
    before = text.rfind("\n", start, at)
    if before > start and text[start:before].strip():
        shorter = start, before
        if reach(blanked(text, shorter)) > at:
            return shorter
    return start, _end(text, start, at)


def _begin(stack: Sequence[Any], text: str, at: int) -> int:
    """Where the unfinished entry begins: after the last open brace, and after all entries that
    are complete.
    """
    for part in stack[_innermost(stack) :]:
        first = cast(tuple[Any, ...], part)[0] if isinstance(part, tuple) else part
        if isinstance(first, Token):
            return first.start_pos or 0
        if hasattr(first, "span"):
            return offset(first.span)
    return at


def _innermost(stack: Sequence[Any]) -> int:
    """The place after the last brace that is open: a branch may have closed one before its
    `else`.
    """
    opened: list[int] = []
    for i, part in enumerate(stack):
        kind = part.type if isinstance(part, Token) else ""
        if kind == "LBRACE":
            opened.append(i)
        elif kind == "RBRACE":
            opened.pop()
    return opened[-1] + 1 if opened else 0


def _end(text: str, start: int, at: int) -> int:
    """The first line end from `at` on at which no bracket is open, or where the block around
    ends.
    """
    depth = 0
    for word in WORD.finditer(text, start):
        line = text.find("\n", max(at, start), word.start())
        if not depth and line >= 0 and line < word.start():
            return line
        if word[0] in ")]}":
            depth -= 1
            if depth < 0:
                return max(word.start(), start + 1)
        depth += word[0] in "([{"
        at = max(at, word.end())
    line = text.find("\n", max(at, start))
    return line if line >= 0 else len(text)


def block_below(text: str, part: Part) -> Part:
    """The part with what goes on from it: a line after a `\\`, all lines further in after a `:`
    at the margin.
    """
    start, end = part
    if text[start:end].endswith("\\"):
        return start, line_around(text, end + 1)[1]
    if text[start:end].rstrip().endswith(":") and text[line_around(text, start)[0]].isalpha():
        below = re.compile(r"(\n([ \t].*)?)*").match(text, end)
        return start, below.end() if below else end
    return part


# ---- brackets


def unpaired(source: Source, mistake: Diagnostic) -> Part:
    """The part to leave out of a text whose brackets or quotes do not pair: a line if that
    helps, a block, or all.
    """
    text, at = source.text, offset(mistake.span)
    for part in _suspects(text, mistake):
        if text[part[0] : part[1]].strip():
            left = pairing(Source(source.path, blanked(text, part)))
            if left is None or offset(left.span) > at:
                return part
    return 0, len(text)


def _suspects(text: str, mistake: Diagnostic) -> Iterator[Part]:
    """Parts to leave out, the smallest first."""
    at = offset(mistake.span)
    noted = [offset(note.span) for note in mistake.notes if note.span]
    if "closes nothing" in mistake.message:
        yield from ((place, place + 1) for place in (*noted[1:], at))
    yield from (line_around(text, place) for place in (*noted[:1], at))
    yield from (_item(text, place) for place in (at, *noted))


def line_around(text: str, at: int) -> Part:
    """The line of an offset, without its end."""
    end = text.find("\n", at)
    return text.rfind("\n", 0, at) + 1, end if end >= 0 else len(text)


def _item(text: str, at: int) -> Part:
    """From the last line that begins with a word at its margin to the next one."""
    margins = [0, *(found.start() for found in re.finditer(r"(?m)^\w", text)), len(text)]
    after = next((i for i, margin in enumerate(margins) if margin > at), len(margins) - 1)
    return margins[after - 1], margins[after]
