"""The words of a plan, comments among them, and how they nest.

Purpose: what the layout is decided by: brackets, operators, and where a statement, setting, rule or section begins.
Non-goals: the constructs of the language.  A guess that is wrong for one to come costs a space, never a meaning.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence

from attrs import frozen
from lark import Token, Transformer

from ..lark_parser import parser

OPENING, CLOSING = "([{", ")]}"
BINDERS = ("=", "~", "over")
"""What stands once in a setting, a statement or a rule, between its names and the rest."""


@frozen
class Word:
    """A word or comment, with the line ends before it and its column in the source, counted from 0."""

    text: str
    line_ends: int
    column: int

    @property
    def is_comment(self) -> bool:
        return self.text[0] == "#"

    @property
    def is_string(self) -> bool:
        return self.text[0] == '"'

    @property
    def is_name(self) -> bool:
        return self.text.isidentifier() and self.text not in BINDERS

    @property
    def is_number(self) -> bool:
        return self.text[0].isdigit()

    @property
    def opens(self) -> bool:
        return self.text in OPENING

    @property
    def closes(self) -> bool:
        return self.text in CLOSING

    @property
    def ends_value(self) -> bool:
        """Whether an operand, or all of an expression, may end with it."""
        return self.is_name or self.is_number or self.is_string or self.text in (")", "]", "..")

    @property
    def is_operator(self) -> bool:
        """Whether it is one of expressions or of dims: `+`, `@`, `->`."""
        return not (self.ends_value or self.is_comment or self.opens or self.closes or self.text in (",", *BINDERS))


@frozen
class Arranged:
    """Words by their position, and how they nest.

    `inside` has for each word the opening bracket in whose pair it stands, -1 for none; a closing bracket stands inside
    its own pair, an opening one outside.  `depth` counts the pairs around a word; both brackets of a pair stand as deep
    as what is around it.  `closing` has for each opening bracket its other, inner pairs first.  `code`
    lists the words that are no comments; `entries` are those that begin a statement, setting, rule or section, and
    `heads` has for each opening brace the entry that it belongs to.
    """

    words: Sequence[Word]
    inside: Sequence[int]
    depth: Sequence[int]
    closing: Mapping[int, int]
    code: Sequence[int]
    entries: frozenset[int]
    heads: Mapping[int, int]

    def among_entries(self, at: int) -> bool:
        """Whether a word stands directly in braces, or in none."""
        return self.inside[at] < 0 or self.words[self.inside[at]].text == "{"

    def before(self, at: int) -> Word | None:
        """The word before, comments left out."""
        place = bisect_left(self.code, at)
        return self.words[self.code[place - 1]] if place else None

    def code_from(self, at: int) -> int | None:
        """A word, or after comments the first that is none."""
        place = bisect_left(self.code, at)
        return self.code[place] if place < len(self.code) else None

    def is_binary(self, at: int) -> bool:
        """Whether a word is an operator between two operands."""
        before = self.before(at)
        return self.words[at].is_operator and before is not None and before.ends_value


def read(text: str) -> list[Word]:
    """The words of a text that the grammar accepts."""
    words: list[Word] = []
    line_ends = 0
    lex: Callable[..., Iterator[Token]] = parser("plan", Transformer()).lex  # type: ignore[reportUnknownMemberType]
    for token in lex(text, dont_ignore=True):
        if token.isspace():
            line_ends = token.count("\n")
        else:
            words.append(Word(token.rstrip(), line_ends, (token.column or 1) - 1))
            line_ends = 0
    return words


def arrange(words: Sequence[Word]) -> Arranged:
    """Words with how they nest."""
    inside: list[int] = []
    depth: list[int] = []
    closing: dict[int, int] = {}
    opened = [-1]
    for at, word in enumerate(words):
        inside.append(opened[-1])
        if word.opens:
            opened.append(at)
        elif word.closes:
            closing[opened.pop()] = at
        depth.append(len(opened) - (2 if word.opens else 1))
    code = [at for at, word in enumerate(words) if not word.is_comment]
    return Arranged(words, inside, depth, closing, code, *_entries(words, inside, code))


def _entries(
    words: Sequence[Word], inside: Sequence[int], code: Sequence[int]
) -> tuple[frozenset[int], dict[int, int]]:
    """Where entries begin, and for each opening brace where its own does."""
    begun: list[int] = []
    heads: dict[int, int] = {}
    opened: list[int] = []
    closed = -1  # the head of the braces that were closed last: `else` goes on with it
    bound = False  # whether the entry has had its binder, so that what follows a value is no longer part of it
    for before, at, after in zip([None, *code], code, [*code[1:], None], strict=False):
        if inside[at] >= 0 and words[inside[at]].text != "{":
            continue
        word = words[at]
        if _begins(words[before] if before is not None else None, word, words[after] if after else None, bound):
            begun.append(at)
            bound = False
        elif word.text in "{}":
            bound = False
        elif word.text in BINDERS:
            bound = True
        if word.text == "{":
            goes_on = before is not None and words[before].text == "else"
            heads[at] = closed if goes_on else begun[-1]
            opened.append(heads[at])
        elif word.text == "}" and opened:
            closed = opened.pop()
    return frozenset(begun), heads


def _begins(before: Word | None, word: Word, after: Word | None, bound: bool) -> bool:
    if not word.is_name or word.text == "from":
        return False
    if before is None or before.text == "{":
        return True
    if before.text == "}":
        return word.text != "else"
    postfix = after is not None and after.is_number  # as in `vocab = 50257 pad 128`
    return before.ends_value and (bound or before.is_string) and not postfix
