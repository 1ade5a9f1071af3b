"""Where lines begin: where the author chose, and where a line would be too long.

One walk from the first line to the last; it goes back where a line found later divides one before.
"""

from collections.abc import Iterator

from ..limits import MAX_BYTES
from .words import INDENT, Arranged, Line, ends, line

LIMIT = 120


def line_starts(plan: Arranged) -> set[int]:
    """The words with which lines begin."""
    breaks = _Breaks(plan)
    for at in range(len(plan.words)):
        if at == 0 or _kept(plan, at):
            breaks.begin(at)
    breaks.divide()
    return set(breaks.end_of)


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


class _Breaks:
    """Lines under division: `end_of` has for the first word of each where the next one begins."""

    def __init__(self, plan: Arranged) -> None:
        self._plan, self._ends = plan, ends(plan)
        self.end_of = {0: len(plan.words)} if plan.words else dict[int, int]()
        self._spread: set[int] = set()

    def begin(self, at: int) -> int:
        """Begins a line with a word; the first line that this changes.

        The content of brackets has lines of its own, where lines begin between its parts.  In
        braces that is any line; a call may hold a list of several lines without being spread out
        itself.
        """
        plan, changed = self._plan, self._cut(at)
        opening = plan.inside[at]
        while opening >= 0 and opening not in self._spread:
            self._spread.add(opening)
            if not plan.words[opening + 1].is_comment:
                changed = min(changed, self._cut(opening + 1))
            changed = min(changed, self._cut(plan.closing[opening]))
            if plan.among_entries(opening):
                opening = plan.inside[opening]
        return changed

    def _cut(self, at: int) -> int:
        """Divides a line before one of its words; returns the line's first word."""
        first = at
        while first not in self.end_of:
            first -= 1
        self.end_of[at] = self.end_of[first]
        if first < at:
            self.end_of[first] = at
        return first

    def divide(self) -> None:
        """Divides lines until none is too long, or the text is larger than it may be."""
        indents = {-1: -INDENT}
        sizes: dict[int, int] = {}
        first = size = 0
        while first < len(self._plan.words) and size <= 2 * MAX_BYTES:  # that never shrinks to half
            found = line(self._plan, first, self.end_of[first], indents)
            width = found.indent + self._width(found)
            if width > LIMIT and (seams := self._seams(found)):
                first = min(map(self.begin, seams))
                continue
            size += width - sizes.get(first, 0)
            sizes[first] = width
            first = self.end_of[first]

    def _width(self, found: Line) -> int:
        """The width of the code, without its indentation."""
        first, end = found.first, found.end
        return (
            self._ends[end - 1] - self._ends[first] + len(self._plan.words[first].text)
            if first < end
            else 0
        )

    def _seams(self, found: Line) -> set[int]:
        """Where a line that is too long is best divided: before as many of its words as one
        rule names.
        """
        return next(
            filter(None, (seams - {found.first} for seams in self._rules(found))), set[int]()
        )

    def _rules(self, line: Line) -> Iterator[set[int]]:
        plan, words, closing = self._plan, self._plan.words, self._plan.closing
        shallow = _shallow(plan, line)
        yield {at for at in shallow if at in plan.entries}
        # items
        yield {at for at in shallow if words[at - 1].text == "," and not plan.among_entries(at)}
        yield {at for at in shallow if words[at].text in ("+", "-") and plan.is_binary(at)}  # terms
        yield {at for at in shallow if words[at].text in ("*", "/", "@")}  # factors
        pairs = [at for at in shallow if at in closing and at + 1 < closing[at] < line.end]
        longest = max(pairs, key=lambda at: self._ends[closing[at]] - self._ends[at], default=None)
        yield set[int]() if longest is None else {longest + 1, closing[longest]}
        # after brackets whose pair ends on a later line, since lines begin deeper in them
        yield {at + 1 for at in shallow if at + 1 < line.end <= closing.get(at, -1)}
        # after brackets of earlier lines that end inside of this one, which gives their ends lines
        # of their own
        closed = (plan.inside[at] for at in range(line.first + 1, line.end) if words[at].closes)
        yield {opening + 1 for opening in closed if opening < line.first}


def _shallow(plan: Arranged, line: Line) -> list[int]:
    """The words of a line at the least depth; pairs of brackets in it are stepped over."""
    found: list[int] = []
    at = line.first
    while at < line.end:
        if found and plan.depth[at] < plan.depth[found[-1]]:
            found = []
        if not found or plan.depth[at] == plan.depth[found[-1]]:
            found.append(at)
        closing = plan.closing.get(at, line.end)
        at = closing if closing < line.end else at + 1
    return found
