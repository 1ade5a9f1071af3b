"""The words of a plan, comments among them, how they nest, and the lines that they make."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

from attrs import frozen
from lark import Token, Transformer

from ...compiler.syntax.lark_parser import parser

OPENING, CLOSING = "([{", ")]}"
BINDERS = ("EQUAL", "TILDE", "OVER", "EVERY")
"""Terminals that occur once in a setting, a statement or a rule, after its names."""


@frozen
class Word:
    """A word or comment, with the line ends before it and its column in the source, counted from 0.

    It `goes_on` with its entry where it is `as` or `via`, before a name; `binds` where it is one of
    `BINDERS`.
    """

    text: str
    line_ends: int
    column: int
    goes_on: bool = False
    binds: bool = False

    @property
    def is_comment(self) -> bool:
        return self.text[0] == "#"

    @property
    def is_string(self) -> bool:
        return self.text[0] == '"'

    @property
    def is_name(self) -> bool:
        return self.text.isidentifier() and not self.binds

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
        return not (
            self.ends_value
            or self.is_comment
            or self.opens
            or self.closes
            or self.binds
            or self.text == ","
        )


@frozen
class Arranged:
    """Words by their position, and how they nest.

    `inside` has for each word the opening bracket of the pair around it, -1 for none; a closing
    bracket is inside its own pair, an opening one outside.  `depth` counts the pairs around a word;
    both brackets of a pair are as deep as what is around it.  `closing` has for each opening
    bracket its other, inner pairs first.  `code` lists the words that are no comments; `entries`
    are the words that begin a statement, setting, rule or section, and `heads` has for each opening
    brace the entry that it belongs to.
    """

    words: Sequence[Word]
    inside: Sequence[int]
    depth: Sequence[int]
    closing: Mapping[int, int]
    code: Sequence[int]
    entries: frozenset[int]
    heads: Mapping[int, int]

    def among_entries(self, number: int) -> bool:
        """Whether a word is directly in braces, or in no brackets."""
        return self.inside[number] < 0 or self.words[self.inside[number]].text == "{"

    def before(self, number: int) -> Word | None:
        """The word before a word, comments left out."""
        place = bisect_left(self.code, number)
        return self.words[self.code[place - 1]] if place else None

    def code_from(self, number: int) -> int | None:
        """A word, or, if it is a comment, the first word after it that is none."""
        place = bisect_left(self.code, number)
        return self.code[place] if place < len(self.code) else None

    def is_binary(self, number: int) -> bool:
        """Whether a word is an operator between two operands."""
        before = self.before(number)
        return self.words[number].is_operator and before is not None and before.ends_value


def split_words(text: str) -> list[Word]:
    """The words of a text that the grammar accepts."""
    words: list[Word] = []
    line_ends = 0
    lexer = parser("plan", Transformer())
    lex: Callable[..., Iterator[Token]] = lexer.lex  # type: ignore[reportUnknownMemberType]
    for token in lex(text, dont_ignore=True):
        if token.isspace():
            line_ends = token.count("\n")
        else:
            column, kind = (token.column or 1) - 1, token.type
            words.append(
                Word(token.rstrip(), line_ends, column, kind in ("AS", "VIA"), kind in BINDERS)
            )
            line_ends = 0
    return words


def arrange(words: Sequence[Word]) -> Arranged:
    """The words, and how they nest."""
    inside: list[int] = []
    depth: list[int] = []
    closing: dict[int, int] = {}
    opened = [-1]
    for number, word in enumerate(words):
        inside.append(opened[-1])
        if word.opens:
            depth.append(len(opened) - 1)
            opened.append(number)
        else:
            if word.closes:
                closing[opened.pop()] = number
            depth.append(len(opened) - 1)
    code = [number for number, word in enumerate(words) if not word.is_comment]
    return Arranged(words, inside, depth, closing, code, *_entries(words, inside, code))


def _entries(
    words: Sequence[Word], inside: Sequence[int], code: Sequence[int]
) -> tuple[frozenset[int], dict[int, int]]:
    """The words that begin entries, and for each opening brace the word that begins its entry."""
    entries: list[int] = []
    heads: dict[int, int] = {}
    opened: list[int] = []
    closed = -1  # the head of the braces that were closed last: `else` goes on with it
    # whether the entry has had its binder, so that a name after a value is no longer part of it
    bound = False
    words_of_code = [words[number] for number in code]
    befores, afters = [None, *words_of_code], [*words_of_code[1:], None]
    for before, number, after in zip(befores, code, afters, strict=False):
        if inside[number] >= 0 and words[inside[number]].text != "{":
            continue
        word = words[number]
        if _begins(before, word, after, bound):
            entries.append(number)
            bound = False
        elif word.text in "{}":
            bound = False
        elif word.binds:
            bound = True
        if word.text == "{":
            goes_on = before is not None and before.text == "else"
            heads[number] = closed if goes_on else entries[-1]
            opened.append(heads[number])
        elif word.text == "}" and opened:
            closed = opened.pop()
    return frozenset(entries), heads


def _begins(before: Word | None, word: Word, after: Word | None, bound: bool) -> bool:
    """Whether a word begins an entry, between the words before and after it; `bound` says whether
    the entry before has had its binder.
    """
    if not word.is_name or word.text == "from":
        return False
    if before is None or before.text == "{":
        return True
    if word.goes_on or before.goes_on or (before.is_string and word.text == "deterministic"):
        return False
    if before.text == "}":
        return word.text != "else"
    postfix = after is not None and after.is_number  # as in `vocab = 50257 pad 128`
    return before.ends_value and (bound or before.is_string) and not postfix


INDENT = 2


@frozen
class Line:
    """The words from `first` to before `end`, and a comment after them if the next line begins
    later than at `end`.
    """

    indent: int
    first: int
    end: int
    comment: int | None
    """The comment beside the code, or alone on the line; there is no code then, and `end` is
    `first`.
    """


def lines(plan: Arranged, starts: Iterable[int]) -> list[Line]:
    """The lines of a plan, given the words with which they start."""
    indents = {-1: -INDENT}
    borders = sorted({*starts, len(plan.words)})
    return [line(plan, first, end, indents) for first, end in pairwise(borders)]


def line(plan: Arranged, first: int, end: int, indents: dict[int, int]) -> Line:
    """The line of some words; `indents` has for each opening bracket the indent of its line, and
    this function adds the brackets of this line.
    """
    indent = _indent(plan, first, indents)
    for number in range(first, end):
        if plan.words[number].opens:
            indents[number] = indent
    if plan.words[end - 1].is_comment:
        return Line(indent, first, end - 1, end - 1)
    return Line(indent, first, end, None)


def code(plan: Arranged, line: Line) -> str:
    """A line without its comment."""
    return " " * line.indent + text(plan, line.first, line.end)


def text(plan: Arranged, first: int, end: int) -> str:
    """Words with the spaces between them."""
    parts: list[str] = []
    for number in range(first, end):
        if number > first:
            parts.append(_gap(plan, number))
        parts.append(plan.words[number].text)
    return "".join(parts)


def ends(plan: Arranged) -> list[int]:
    """The column where each word would end if all stood on one line."""
    widths = (len(_gap(plan, number)) + len(word.text) for number, word in enumerate(plan.words))
    return list(accumulate(widths))


def _indent(plan: Arranged, first: int, indents: dict[int, int]) -> int:
    """The indent of the line that begins with a word."""
    around = indents[plan.inside[first]]
    if plan.words[first].closes:
        return around
    number = plan.code_from(first)
    if number is None or number in plan.entries:
        return around + INDENT
    if plan.words[number].text in "{}" or not plan.among_entries(number):
        return around + INDENT
    # the line goes on with the entry of the word before, unless this word ends an entry
    before = plan.before(number)
    if before is None or before.text == "}":
        return around + INDENT
    return around + 2 * INDENT


def _gap(plan: Arranged, number: int) -> str:
    """The space between a word and the one before it on the same line."""
    before, word = plan.words[number - 1], plan.words[number]
    if number in plan.entries and before.text != "{":
        return "  "
    if before.text in "([" or word.text in ")]," or before.text + word.text == "{}":
        return ""
    if (before.is_number and word.text == "..") or (before.text == ".." and word.is_number):
        return ""
    if word.text in "([" and before.is_name:
        return ""
    for neighbour in (number - 1, number):
        # the `=` of an argument
        if plan.words[neighbour].text == "=" and not plan.among_entries(neighbour):
            return ""
    # a sign belongs to its operand
    return "" if before.is_operator and not plan.is_binary(number - 1) else " "
