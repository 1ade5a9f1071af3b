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
    if (
        at == 0
        or plan.words[at].line_ends < 2
        or plan.words[at - 1].opens
        or not plan.among_entries(at)
    ):
        return False
    return at in plan.entries or plan.words[at].is_comment


# ---- code


def _runs(plan: Arranged, lines: Sequence[Line]) -> Iterator[dict[Line, int]]:
    """Neighbouring lines of one kind, each with its anchor; comments on lines of their own may
    come between.
    """
    run: dict[Line, int] = {}
    kind = None
    for line in lines:
        at = _anchor(plan, line)
        own = None if at is None else (plan.words[at].text, plan.inside[at])
        if run and (_blank_before(plan, line) or (line.first < line.end and own != kind)):
            yield run
            run = {}
        if at is not None:
            run[line], kind = at, own
    if run:
        yield run


def _anchor(plan: Arranged, line: Line) -> int | None:
    """The word of a line that is one entry, and all of it, that may share a column with those
    of its neighbours.
    """
    level = [at for at in range(line.first, line.end) if plan.inside[at] == plan.inside[line.first]]
    if [at for at in level if at in plan.entries] != [line.first]:
        return None
    words = plan.words
    at = next(
        (
            at
            for at in level
            if words[at].text == "{" or (words[at].binds and words[at].text != "~")
        ),
        None,
    )
    if at is None:
        return None
    if words[at].text == "{":
        is_section = plan.closing[at] == line.end - 1 and all(
            word.is_name for word in words[line.first : at]
        )
        return at if is_section else None
    among_statements = plan.inside[at] < 0 or words[plan.heads[plan.inside[at]]].text in STATEMENTS
    return None if words[at].text == "=" and among_statements else at


def _padded(plan: Arranged, run: Mapping[Line, int]) -> dict[Line, str]:
    """The code of lines with their anchors in one column, or nothing if one would become too
    long.
    """
    cut = {line: _columns(plan, line, at) for line, at in run.items()}
    rows = {line: " " * line.indent + cut[line][""] for line in run}
    for column in (_ANCHOR, *_PARTS):
        those = [line for line in rows if column in cut[line]]
        width = max((len(rows[line]) for line in those), default=0)
        rows |= {line: f"{rows[line]:<{width}} {cut[line][column]}" for line in those}
    return rows if max(map(len, rows.values())) <= LIMIT else {}


def _columns(plan: Arranged, line: Line, anchor: int) -> dict[str, str]:
    """The text of each column of a line, by the word that begins it; "" for the first."""
    parts = [at for at in range(anchor, line.end) if plan.words[at].goes_on]
    starts = {"": line.first, _ANCHOR: anchor} | {plan.words[at].text: at for at in parts}
    ends = [*starts.values(), line.end][1:]
    return {name: text(plan, at, end) for (name, at), end in zip(starts.items(), ends, strict=True)}


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
    columns: dict[Line, int] = {}
    for _, group in groupby(
        _beside(plan, lines), lambda line: plan.words[line.comment or 0].column
    ):
        together = list(group)
        columns |= dict.fromkeys(together, max(len(codes[line].rstrip()) for line in together) + 1)
    return columns


def _beside(plan: Arranged, lines: Sequence[Line]) -> Iterator[Line]:
    """The lines with a comment beside code, and those with nothing but its next line, in the
    same column.
    """
    last = None
    for line in lines:
        word = None if line.comment is None else plan.words[line.comment]
        goes_on = last and word and word.line_ends == 1 and word.column == last.column
        last = word if goes_on or line.first < line.end else None
        if last:
            yield line
