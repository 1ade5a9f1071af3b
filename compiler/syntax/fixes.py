"""The edits that mend a mistake, read from the words of its help: one row for each form of these
words.
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
"""Patterns of a help and of the words that its diagnostic is about, and the words to put in their
place; a `key` is the setting's key.
"""


_LIST = r"(`[\w:./]+`(?:(?:, | or )`[\w:./]+`)+)"
CHOICES = re.compile(
    rf"(?:did you mean|it is one of|there are|(?:axes of `mesh`|dims|ops) are) {_LIST}\??$"
)
MOST = 6
"""The words that a help offers as choices, and up to how many such words become edits."""


@frozen
class Fix:
    """An edit that mends a mistake: `text` in the place of `span`, "" to leave the span out."""

    span: Span
    text: str


def fixes(diagnostic: Diagnostic) -> Iterator[Fix]:
    """The edits; each of them mends the mistake by itself."""
    if diagnostic.span.line != diagnostic.span.end_line:
        return
    yield from _choices(diagnostic)
    for help_pattern, words_pattern, text in ROWS:
        span = _word(diagnostic) if words_pattern == WORD else diagnostic.span
        help = re.search(help_pattern, diagnostic.help)
        words = re.fullmatch(words_pattern, span.words)
        if not help or not words:
            continue
        groups = {**words.groupdict(), **help.groupdict()}
        # a help may be about another setting than the diagnostic's words
        if groups.get("key") in (None, groups.get("own")):
            new = text.format_map(groups)
            yield Fix(span if new else _with_space(span), new)


def _choices(diagnostic: Diagnostic) -> Iterator[Fix]:
    """An edit for each word that the help offers, if these are few."""
    choices = CHOICES.match(diagnostic.help)
    if not choices:
        return
    words = re.findall("`([^`]+)`", choices[1])
    span = _word(diagnostic)
    if re.fullmatch(WORD, span.words) and len(words) <= MOST:
        for word in words:
            yield Fix(span, word)


def _word(diagnostic: Diagnostic) -> Span:
    """The place of the last word that the message quotes, if this is a part of the diagnostic's
    words; else the place of all of these.
    """
    span, quoted = diagnostic.span, re.findall("`([^`]+)`", diagnostic.message)
    if not quoted or span.words.count(quoted[-1]) != 1:
        return span
    column = span.column + span.words.index(quoted[-1])
    return evolve(span, column=column, end_column=column + len(quoted[-1]))


def _with_space(span: Span) -> Span:
    """The span and the space before it on its line, unless the line begins with it."""
    before = span.text.split("\n")[span.line - 1][: span.column - 1]
    if not before.strip():
        return span
    return evolve(span, column=len(before.rstrip()) + 1)
