"""Alignment in columns: `=` and `every` of settings, `over`, `as` and `via` of rules, the `{` of sections, comments.

Consecutive settings, rules and sections, one to a line without a blank line between, share a column.  Comments
after code share one where they did in the source.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from attrs import frozen

from .breaks import LIMIT
from .words import Arranged, Line, Word, code, text

STATEMENTS = ("model", "repeat", "if", "route")
"""Heads of sections that have statements in their braces."""


def aligned(plan: Arranged, lines: Sequence[Line]) -> Iterator[str]:
    """The lines of the formatted text, without their ends."""
    codes = {line: code(plan, line) for line in lines}
    for run in _runs(plan, lines):
        codes |= _padded(plan, run)
    columns = _comment_columns(plan, lines, codes)
    for line in lines:
        if _blank_before(plan, line):
            yield ""
        comment = plan.words[line.comment].text if line.comment is not None else ""
        yield codes[line].ljust(columns.get(line, 0)) + comment


def _blank_before(plan: Arranged, line: Line) -> bool:
    at = line.first
    if at == 0 or plan.words[at].line_ends < 2 or plan.words[at - 1].opens or not plan.among_entries(at):
        return False
    return at in plan.entries or plan.words[at].is_comment


# ---- code


@frozen
class _Anchored:
    """A line that is one entry, and the word of it that may share a column with those of its neighbours."""

    line: Line
    at: int


def _runs(plan: Arranged, lines: Sequence[Line]) -> Iterator[list[_Anchored]]:
    """Neighbouring lines of one kind; comments on lines of their own may come between."""
    run: list[_Anchored] = []
    for line in lines:
        anchored = _anchored(plan, line)
        if _blank_before(plan, line) or (line.first < line.end and not _alike(plan, run, anchored)):
            yield from [run] if run else []
            run = []
        run += [anchored] if anchored else []
    yield from [run] if run else []


def _alike(plan: Arranged, run: Sequence[_Anchored], anchored: _Anchored | None) -> bool:
    if not run or not anchored:
        return False
    kinds = [(plan.words[each.at].text, plan.inside[each.at]) for each in (run[-1], anchored)]
    return kinds[0] == kinds[1]


def _anchored(plan: Arranged, line: Line) -> _Anchored | None:
    level = [at for at in range(line.first, line.end) if plan.inside[at] == plan.inside[line.first]]
    if [at for at in level if at in plan.entries] != [line.first]:
        return None
    at = next((at for at in level if _may_align(plan.words[at])), None)
    if at is None or (plan.words[at].text == "=" and _is_statement(plan, at)):
        return None
    return _Anchored(line, at) if plan.words[at].text != "{" or _is_section(plan, line, at) else None


def _may_align(word: Word) -> bool:
    return word.text == "{" or (word.binds and word.text != "~")


def _is_statement(plan: Arranged, at: int) -> bool:
    return plan.inside[at] < 0 or plan.words[plan.heads[plan.inside[at]]].text in STATEMENTS


def _is_section(plan: Arranged, line: Line, brace: int) -> bool:
    """Whether a line is all of a section."""
    return plan.closing[brace] == line.end - 1 and all(word.is_name for word in plan.words[line.first : brace])


def _padded(plan: Arranged, run: Sequence[_Anchored]) -> dict[Line, str]:
    """The code of lines with their anchors in one column, or nothing if one would become too long."""
    cut = {it.line: _columns(plan, it) for it in run}
    rows = {it.line: " " * it.line.indent + cut[it.line][""] for it in run}
    for column in (_ANCHOR, *_PARTS):
        those = [line for line in rows if column in cut[line]]
        width = max((len(rows[line]) for line in those), default=0)
        rows |= {line: f"{rows[line]:<{width}} {cut[line][column]}" for line in those}
    return rows if max(map(len, rows.values())) <= LIMIT else {}


def _columns(plan: Arranged, it: _Anchored) -> dict[str, str]:
    """The text of each column of a line, by the word that begins it; "" for the first."""
    parts = [at for at in range(it.at, it.line.end) if plan.words[at].goes_on]
    starts = {"": it.line.first, _ANCHOR: it.at} | {plan.words[at].text: at for at in parts}
    ends = [*starts.values(), it.line.end][1:]
    return {name: text(plan, at, end) for (name, at), end in zip(starts.items(), ends, strict=True)}


_ANCHOR = "anchor"
_PARTS = ("as", "via")
"""Parts of a rule after its axes."""


# ---- comments


def _comment_columns(plan: Arranged, lines: Sequence[Line], codes: dict[Line, str]) -> dict[Line, int]:
    """The columns of comments after code; neighbours that share a column in the source stay together."""
    columns: dict[Line, int] = {}
    for _, group in groupby(_beside(plan, lines), lambda line: plan.words[line.comment or 0].column):
        together = list(group)
        columns |= dict.fromkeys(together, max(len(codes[line].rstrip()) for line in together) + 1)
    return columns


def _beside(plan: Arranged, lines: Sequence[Line]) -> Iterator[Line]:
    """The lines with a comment beside code, and those with nothing but its next line, in the same column."""
    last = None
    for line in lines:
        alone = line.first == line.end
        if line.comment is None or (alone and not _continues(plan, last, line.comment)):
            last = None
        else:
            last = line.comment
            yield line


def _continues(plan: Arranged, last: int | None, comment: int) -> bool:
    if last is None:
        return False
    before, word = plan.words[last], plan.words[comment]
    return word.line_ends == 1 and word.column == before.column
