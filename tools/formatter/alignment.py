"""Alignment in columns: `=` and `every` of settings, `over`, `as` and `via` of rules, the `{` of
sections, comments.

Consecutive settings, rules and sections, one to a line without a blank line between, share a
column.  Comments after code share one where they did in the source.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from .breaks import LIMIT
from .words import Arranged, Line, code, text

STATEMENTS = ("model", "repeat", "if", "route")
"""Heads of sections that have statements in their braces."""


def align_lines(plan: Arranged, lines: Sequence[Line]) -> Iterator[str]:
    """The lines of the formatted text, without their ends."""
    codes = {line: code(plan, line) for line in lines}
    for run in _runs(plan, lines):
        codes |= _pad_columns(plan, run)
    columns = _comment_columns(plan, lines, codes)
    for line in lines:
        if _blank_before(plan, line):
            yield ""
        comment = ""
        if line.comment is not None:
            comment = plan.words[line.comment].text
        yield codes[line].ljust(columns.get(line, 0)) + comment


def _blank_before(plan: Arranged, line: Line) -> bool:
    """Whether a blank line of the source before an entry or a comment stays."""
    first = line.first
    if first == 0 or plan.words[first].line_ends < 2:
        return False
    if plan.words[first - 1].opens or not plan.among_entries(first):
        return False
    return first in plan.entries or plan.words[first].is_comment


# ---- code


def _runs(plan: Arranged, lines: Sequence[Line]) -> Iterator[dict[Line, int]]:
    """Neighbouring lines of one kind, each with its anchor; comments on lines of their own may
    come between.
    """
    run: dict[Line, int] = {}
    kind_of_run = None
    for line in lines:
        anchor, kind = _anchor(plan, line), None
        if anchor is not None:
            kind = (plan.words[anchor].text, plan.inside[anchor])
        is_other_code = line.first < line.end and kind != kind_of_run
        if run and (_blank_before(plan, line) or is_other_code):
            yield run
            run = {}
        if anchor is not None:
            run[line], kind_of_run = anchor, kind
    if run:
        yield run


def _anchor(plan: Arranged, line: Line) -> int | None:
    """The word of a line that may share a column with words of its neighbours; None unless the
    line is one whole entry.
    """
    around = plan.inside[line.first]
    level = [number for number in range(line.first, line.end) if plan.inside[number] == around]
    if [number for number in level if number in plan.entries] != [line.first]:
        return None
    for number in level:
        word = plan.words[number]
        if word.text == "{":
            names = plan.words[line.first : number]
            is_section = all(name.is_name for name in names)
            closes_with_line = plan.closing[number] == line.end - 1
            return number if is_section and closes_with_line else None
        if word.binds and word.text != "~":
            # the `=` of statements are not aligned
            return None if word.text == "=" and _is_statement(plan, around) else number
    return None


def _is_statement(plan: Arranged, around: int) -> bool:
    """Whether entries inside the brace `around` are statements; outside of all braces they are."""
    return around < 0 or plan.words[plan.heads[around]].text in STATEMENTS


def _pad_columns(plan: Arranged, run: Mapping[Line, int]) -> dict[Line, str]:
    """The code of lines with their anchors in one column; empty if one would become too long."""
    columns = {line: _columns(plan, line, anchor) for line, anchor in run.items()}
    rows = {line: " " * line.indent + columns[line][""] for line in run}
    for column in (_ANCHOR, *_PARTS):
        lines = [line for line in rows if column in columns[line]]
        width = max((len(rows[line]) for line in lines), default=0)
        for line in lines:
            rows[line] = f"{rows[line]:<{width}} {columns[line][column]}"
    if max(map(len, rows.values())) > LIMIT:
        return {}
    return rows


def _columns(plan: Arranged, line: Line, anchor: int) -> dict[str, str]:
    """The text of each column of a line, by the word that begins it; "" for the first."""
    starts = {"": line.first, _ANCHOR: anchor}
    for number in range(anchor, line.end):
        if plan.words[number].goes_on:
            starts[plan.words[number].text] = number
    ends = [*starts.values(), line.end][1:]
    columns: dict[str, str] = {}
    for (name, start), end in zip(starts.items(), ends, strict=True):
        columns[name] = text(plan, start, end)
    return columns


_ANCHOR = "anchor"
_PARTS = ("as", "via")
"""Parts of a rule after its axes."""


# ---- comments


def _comment_columns(
    plan: Arranged, lines: Sequence[Line], codes: dict[Line, str]
) -> dict[Line, int]:
    """The columns of comments after code; neighbours that share a column in the source stay
    together.
    """

    def source_column(line: Line) -> int:
        return plan.words[line.comment or 0].column

    columns: dict[Line, int] = {}
    for _, group in groupby(_beside(plan, lines), source_column):
        lines_of_group = list(group)
        width = max(len(codes[line].rstrip()) for line in lines_of_group)
        columns |= dict.fromkeys(lines_of_group, width + 1)
    return columns


def _beside(plan: Arranged, lines: Sequence[Line]) -> Iterator[Line]:
    """The lines with a comment beside code, and the lines that only continue such a comment in
    the same column.
    """
    last = None
    for line in lines:
        word = None if line.comment is None else plan.words[line.comment]
        goes_on = last and word and word.line_ends == 1 and word.column == last.column
        last = word if goes_on or line.first < line.end else None
        if last:
            yield line
