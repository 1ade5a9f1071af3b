"""The beginnings of lines: the author's, and more where a line would be too long.

One walk goes from the first line to the last; it goes back where a later line divides an earlier
one.
"""

from collections.abc import Iterator

from ...compiler.syntax.limits import MAX_BYTES
from .words import INDENT, Arranged, Line, ends, line

LIMIT = 120


def line_starts(plan: Arranged) -> set[int]:
    """The words with which lines begin."""
    breaks = _Breaks(plan)
    for number in range(len(plan.words)):
        if number == 0 or _keeps_break(plan, number):
            breaks.begin(number)
    breaks.divide()
    return set(breaks.end_of)


def _keeps_break(plan: Arranged, number: int) -> bool:
    """Whether the author's line end before a word stays; after a comment there always is one."""
    before, word = plan.words[number - 1], plan.words[number]
    if before.is_comment or not word.line_ends:
        return before.is_comment
    if word.is_comment or number in plan.entries:
        return True
    if before.opens or word.closes:
        return not (before.opens and word.closes)
    after_binder = before.text == "=" and plan.among_entries(number)
    if before.text == "," or after_binder:
        return True
    return plan.is_binary(number - 1) or plan.is_binary(number)


class _Breaks:
    """Lines under division: `end_of` has the end of each line, by its first word."""

    def __init__(self, plan: Arranged) -> None:
        self._plan, self._ends = plan, ends(plan)
        self.end_of = {0: len(plan.words)} if plan.words else dict[int, int]()
        self._spread: set[int] = set()

    def begin(self, number: int) -> int:
        """Begins a line with a word; returns the first line that this changes.

        If a line begins between the parts of brackets, their content gets lines of its own.  In
        braces this is so for any line; a call may hold a list of several lines without being spread
        out itself.
        """
        plan, changed = self._plan, self._cut(number)
        opening = plan.inside[number]
        while opening >= 0 and opening not in self._spread:
            self._spread.add(opening)
            if not plan.words[opening + 1].is_comment:
                changed = min(changed, self._cut(opening + 1))
            changed = min(changed, self._cut(plan.closing[opening]))
            if plan.among_entries(opening):
                opening = plan.inside[opening]
        return changed

    def _cut(self, number: int) -> int:
        """Divides a line before one of its words; returns the line's first word."""
        first = number
        while first not in self.end_of:
            first -= 1
        self.end_of[number] = self.end_of[first]
        if first < number:
            self.end_of[first] = number
        return first

    def divide(self) -> None:
        """Divides lines until none is too long, or the text is larger than it may be."""
        indents = {-1: -INDENT}
        sizes: dict[int, int] = {}
        first = size = 0
        # a text of twice the allowed size never shrinks to half
        while first < len(self._plan.words) and size <= 2 * MAX_BYTES:
            current = line(self._plan, first, self.end_of[first], indents)
            width = current.indent + self._width(current)
            if width > LIMIT and (seams := self._seams(current)):
                first = min(map(self.begin, seams))
                continue
            size += width - sizes.get(first, 0)
            sizes[first] = width
            first = self.end_of[first]

    def _width(self, line: Line) -> int:
        """The width of the code, without its indentation."""
        first, end = line.first, line.end
        if first == end:
            return 0
        return self._ends[end - 1] - self._ends[first] + len(self._plan.words[first].text)

    def _seams(self, line: Line) -> set[int]:
        """The words to divide a line before that is too long: all words that the first rule with
        any names.
        """
        for words in self._rules(line):
            seams = words - {line.first}
            if seams:
                return seams
        return set()

    def _rules(self, line: Line) -> Iterator[set[int]]:
        """For each rule the words of a line that a new line may begin with, the best rule first."""
        plan, words, closing = self._plan, self._plan.words, self._plan.closing
        shallow = _shallow(plan, line)
        yield {number for number in shallow if number in plan.entries}
        items, terms, factors = set[int](), set[int](), set[int]()
        for number in shallow:
            if words[number - 1].text == "," and not plan.among_entries(number):
                items.add(number)
            if words[number].text in ("+", "-") and plan.is_binary(number):
                terms.add(number)
            if words[number].text in ("*", "/", "@"):
                factors.add(number)
        yield items
        yield terms
        yield factors
        yield self._longest_pair(shallow, line)
        # after brackets whose pair ends on a later line, since lines begin deeper in them
        yield {number + 1 for number in shallow if number + 1 < line.end <= closing.get(number, -1)}
        # after brackets of earlier lines that end inside of this one, which gives their ends lines
        # of their own
        openings = set[int]()
        for number in range(line.first + 1, line.end):
            if words[number].closes and plan.inside[number] < line.first:
                openings.add(plan.inside[number] + 1)
        yield openings

    def _longest_pair(self, words: list[int], line: Line) -> set[int]:
        """The first word inside the longest pair of brackets in a line, and the pair's end."""
        closing, ends = self._plan.closing, self._ends
        longest, length_of_longest = None, -1
        for number in words:
            if number in closing and number + 1 < closing[number] < line.end:
                length = ends[closing[number]] - ends[number]
                if length > length_of_longest:
                    longest, length_of_longest = number, length
        return set() if longest is None else {longest + 1, closing[longest]}


def _shallow(plan: Arranged, line: Line) -> list[int]:
    """The words of a line at the least depth; the walk steps over pairs of brackets."""
    shallow: list[int] = []
    number = line.first
    while number < line.end:
        if shallow and plan.depth[number] < plan.depth[shallow[-1]]:
            shallow = []
        if not shallow or plan.depth[number] == plan.depth[shallow[-1]]:
            shallow.append(number)
        closing = plan.closing.get(number, line.end)
        number = closing if closing < line.end else number + 1
    return shallow
