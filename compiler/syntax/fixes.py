"""The edits that mend a mistake, as the words of its help say them: one row for each way to say
what to write.
"""

import re
from collections.abc import Iterator

from attrs import evolve, frozen

from .diagnostics import Diagnostic
from .source import Span

WORD, SETTING = r"[\w:./*-]+", r"(?P<own>\w+)\s*=\s.*"

ROWS = (
    (r"did you mean `(?P<new>[^`]+)`\?$", WORD, "{new}"),
    (r"it is called `(?P<new>\w+)`(?!, as in)", WORD, "{new}"),
    (r"write `(?P<key>\w+) = (?P<new>[^`…]+)`", SETTING, "{key} = {new}"),
    (r"leave (?:it|`(?P<key>\w+)`) out", SETTING, ""),
    (r"multiples of .* for instance (?P<new>\d+)$", SETTING, "{own} = {new}"),
    (r"write `(?P<new>\d+\.\.\d+)`, the least first", r"\d+\.\.\d+", "{new}"),
    (r"write `(?P<new>\w+)` without brackets", r"\w+\[.*\]", "{new}"),
    (r"write `(?P<new>\w+)`, or `\"", r'"\w+"', "{new}"),
    (r"write (?:`\d+` or )?`(?P<new>\d+)`: a whole number", r"[\d.]+\w*", "{new}"),
    (r"write `(?P<new>[\w, ]+ over [\w, ]+)`$", rf"{SETTING}|.+ -> .+", "{new}"),
    (r"write `(?P<new>\w+ over [\w, ]+)` too", r"(?P<own>.+ over .+)", "{own}  {new}"),
    (r"write `(?P<new>\w+\[.+->.+\])`", r"(?P<left>.+ @ )\w+\[.+\]", "{left}{new}"),
    (r"write `mask=(?P<new>\w+)`", r"(?P<left>.*mask=)\w+(?P<right>.*)", "{left}{new}{right}"),
    (r"write `(?P<new>every\(\d+, \w+\))`", r"(?P<own>\w+) = every\(.*\)", "{own} = {new}"),
    (r"write `\((?P<new>tokens.+?)\)`", r"\w+\[.*\]", "{new}"),
    (r"write `(?P<new>->)`, as in", r"=>", "{new}"),
    (r"write `\w+ (?P<new>=) [^`]+`$", r":=?", "{new}"),
    (r"a setting is written `\w+ (?P<new>= [^`]+)`", r"\S+", "{new}"),
    (r"write `over (?P<new>\w+)`", r"\[.*\]", "{new}"),
    (r"write `init .*(?P<new>~) …`", r"=", "{new}"),
    (r"write `(?P<new>\"[^`]+\")`$", WORD, "{new}"),
    (r"write `(?P<new>0\.\d+)`$", r"\.\d+", "{new}"),
    (r"write `(?P<new>\w+) \{ … \}`$", r"\w+\s*=", "{new}"),
)
"""The words of a help, those that the diagnostic is about, and those in their place; a key is
that of the setting.
"""


_LIST = r"(`[\w:./]+`(?:(?:, | or )`[\w:./]+`)+)"
CHOICES = re.compile(
    rf"(?:did you mean|it is one of|there are|(?:axes of `mesh`|dims|ops) are) {_LIST}\??$"
)
MOST = 6
"""The words that a help leaves to choose from, and how many of them are edits."""


@frozen
class Fix:
    """An edit that mends a mistake: `text` in the place of `span`, "" to leave that out."""

    span: Span
    text: str


def fixes(diagnostic: Diagnostic) -> Iterator[Fix]:
    """The edits, each of which mends the mistake by itself."""
    if diagnostic.span.line != diagnostic.span.end_line:
        return
    if choices := CHOICES.match(diagnostic.help):
        words = re.findall("`([^`]+)`", choices[1])
        if re.fullmatch(WORD, (span := _word(diagnostic)).words) and len(words) <= MOST:
            yield from (Fix(span, word) for word in words)
    for says, about, text in ROWS:
        span = _word(diagnostic) if about == WORD else diagnostic.span
        help, words = re.search(says, diagnostic.help), re.fullmatch(about, span.words)
        if help and words:
            named = {**words.groupdict(), **help.groupdict()}
            if named.get("key") in (None, named.get("own")):
                new = text.format_map(named)
                yield Fix(span if new else _with_space(span), new)


def _word(diagnostic: Diagnostic) -> Span:
    """The place of the word that the message ends with, where the diagnostic is about more, or
    else all of that.
    """
    span, named = diagnostic.span, re.findall("`([^`]+)`", diagnostic.message)
    if not named or span.words.count(named[-1]) != 1:
        return span
    column = span.column + span.words.index(named[-1])
    return evolve(span, column=column, end_column=column + len(named[-1]))


def _with_space(span: Span) -> Span:
    """The span and the space before it on its line, unless the line begins with it."""
    before = span.text.split("\n")[span.line - 1][: span.column - 1]
    return evolve(span, column=len(before.rstrip()) + 1) if before.strip() else span
