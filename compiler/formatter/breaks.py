"""Where lines begin: where the author chose, and where a line would be too long.

Non-goals: what has neither brackets nor operators stays on its line, however long.
"""

from collections.abc import Callable

from .lines import Line, code, lines, text
from .words import Arranged

LIMIT = 120


def line_starts(plan: Arranged) -> set[int]:
    """The words with which lines begin."""
    starts = {at for at in range(len(plan.words)) if at == 0 or _kept(plan, at)}
    _settle(plan, starts)
    while more := {at for line in lines(plan, starts) if len(code(plan, line)) > LIMIT for at in _seams(plan, line)}:
        starts |= more
        _settle(plan, starts)
    return starts


def _kept(plan: Arranged, at: int) -> bool:
    """Whether the author's line end before a word stays; after a comment there always is one."""
    before, word = plan.words[at - 1], plan.words[at]
    if before.is_comment or not word.line_ends:
        return before.is_comment
    if word.is_comment or at in plan.entries:
        return True
    if before.opens or word.closes:
        return not (before.opens and word.closes)
    after_binder = before.text == "=" and plan.among_entries(at)
    return before.text == "," or after_binder or plan.is_binary(at - 1) or plan.is_binary(at)


def _settle(plan: Arranged, starts: set[int]) -> None:
    """Gives what stands in brackets lines of its own, where lines begin between its parts.

    In braces that is any line; a call may hold a list of several lines without being spread out itself.
    """
    spread = {plan.inside[at] for at in starts}
    for opening, closing in plan.closing.items():
        if opening not in spread:
            continue
        starts |= {closing} if plan.words[opening + 1].is_comment else {opening + 1, closing}
        if plan.among_entries(opening):
            spread.add(plan.inside[opening])


# ---- lines that are too long


def _seams(plan: Arranged, line: Line) -> set[int]:
    """Where a line that is too long is best divided: before as many of its words as one rule names."""
    least = min(plan.depth[line.first : line.end])
    shallow = [at for at in range(line.first, line.end) if plan.depth[at] == least]
    found = (rule(plan, shallow, line) - {line.first} for rule in _RULES)
    return next(filter(None, found), set[int]())


def _entries(plan: Arranged, shallow: list[int], _line: Line) -> set[int]:
    return {at for at in shallow if at in plan.entries}


def _items(plan: Arranged, shallow: list[int], _line: Line) -> set[int]:
    return {at for at in shallow if plan.words[at - 1].text == "," and not plan.among_entries(at)}


def _terms(plan: Arranged, shallow: list[int], _line: Line) -> set[int]:
    return {at for at in shallow if plan.words[at].text in ("+", "-") and plan.is_binary(at)}


def _factors(plan: Arranged, shallow: list[int], _line: Line) -> set[int]:
    return {at for at in shallow if plan.words[at].text in ("*", "/", "@")}


def _brackets(plan: Arranged, shallow: list[int], line: Line) -> set[int]:
    pairs = [(at, plan.closing[at]) for at in shallow if at in plan.closing]
    whole = [(opening, closing) for opening, closing in pairs if opening + 1 < closing < line.end]
    longest = max(whole, key=lambda pair: len(text(plan, *pair)), default=None)
    return {longest[0] + 1, longest[1]} if longest else set()


_RULES: tuple[Callable[[Arranged, list[int], Line], set[int]], ...] = (_entries, _items, _terms, _factors, _brackets)
