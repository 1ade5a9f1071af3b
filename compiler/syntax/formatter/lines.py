"""Lines: their words, their indentation, and the spaces between words."""

from collections.abc import Iterable
from itertools import accumulate, pairwise

from attrs import frozen

from .words import Arranged

INDENT = 2


@frozen
class Line:
    """The words from `first` to before `end`, and a comment behind them if `end` is not where the next line begins."""

    indent: int
    first: int
    end: int
    comment: int | None
    """The comment beside the code, or alone on the line; there is no code then, and `end` is `first`."""


def lines(plan: Arranged, starts: Iterable[int]) -> list[Line]:
    """The lines of a plan, given the words with which they start."""
    indents = {-1: -INDENT}
    return [line(plan, first, end, indents) for first, end in pairwise(sorted({*starts, len(plan.words)}))]


def line(plan: Arranged, first: int, end: int, indents: dict[int, int]) -> Line:
    """The line of some words; `indents` are those of the lines of opening brackets, extended by this one's."""
    indent = _indent(plan, first, indents)
    indents |= {at: indent for at in range(first, end) if plan.words[at].opens}
    comment = end - 1 if plan.words[end - 1].is_comment else None
    return Line(indent, first, end if comment is None else comment, comment)


def code(plan: Arranged, line: Line) -> str:
    """A line without its comment."""
    return " " * line.indent + text(plan, line.first, line.end)


def text(plan: Arranged, first: int, end: int) -> str:
    """Words with the spaces between them."""
    return "".join((_gap(plan, at) if at > first else "") + plan.words[at].text for at in range(first, end))


def ends(plan: Arranged) -> list[int]:
    """Where each word would end if all stood on one line."""
    return list(accumulate(len(_gap(plan, at)) + len(word.text) for at, word in enumerate(plan.words)))


def _indent(plan: Arranged, first: int, indents: dict[int, int]) -> int:
    around = indents[plan.inside[first]]
    if plan.words[first].closes:
        return around
    code = plan.code_from(first)
    return around + INDENT + (INDENT if code is not None and _goes_on(plan, code) else 0)


def _goes_on(plan: Arranged, at: int) -> bool:
    """Whether a word at the start of a line belongs to an entry begun on a line before."""
    if at in plan.entries or plan.words[at].text in "{}" or not plan.among_entries(at):
        return False
    before = plan.before(at)
    return before is not None and before.text != "}"


def _gap(plan: Arranged, at: int) -> str:
    """The space between a word and the one before it on the same line."""
    before, word = plan.words[at - 1], plan.words[at]
    if at in plan.entries and before.text != "{":
        return "  "
    if before.text in "([" or word.text in ")]," or before.text + word.text == "{}":
        return ""
    if word.text in "([" and before.is_name:
        return ""
    if any(plan.words[i].text == "=" and not plan.among_entries(i) for i in (at - 1, at)):
        return ""
    return "" if before.is_operator and not plan.is_binary(at - 1) else " "
