"""Lays a plan out in the style of plans.

Indentation, spaces, alignment and blank lines are in one style; every word and every comment stays.
The author chooses where lines end, except in lines longer than `LIMIT` and in brackets that open on
one line and close on another.
"""

from ...compiler.syntax.diagnostics import wrong
from ...compiler.syntax.limits import MAX_BYTES
from ...compiler.syntax.parser import parse_plan
from ...compiler.syntax.source import Source, is_ir
from .alignment import align_lines
from .breaks import line_starts
from .words import arrange, lines, split_words


def format_plan(source: Source) -> str:
    """The text of a plan in scalec's layout; formatting the result changes nothing.

    Raises PlanError where the text is not a plan, or would grow beyond what one may be.
    """
    if is_ir(source.text):
        help = "`scalec fmt` is for plans; IR text has the one form in which `scalec ir` prints it"
        raise wrong("E0190", "this is IR text, not a plan", source.whole(), help=help)
    parse_plan(source)
    plan = arrange(split_words(source.text))
    text = "".join(f"{line}\n" for line in align_lines(plan, lines(plan, line_starts(plan))))
    words_before = [word.text for word in plan.words]
    words_after = [word.text for word in split_words(text)]
    assert words_after == words_before, "formatter: words have changed"
    if len(text.encode()) > MAX_BYTES:
        message = f"laid out, this plan would be larger than {MAX_BYTES // 1024} KiB"
        raise wrong("E0102", message, source.whole())
    return text
