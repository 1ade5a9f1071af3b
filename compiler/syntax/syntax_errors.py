"""Words syntax errors: the text found, what could have been there, and what was probably meant."""

from collections.abc import Set
from typing import Any, cast

from lark import Token
from lark.exceptions import UnexpectedInput, UnexpectedToken

from .diagnostics import Diagnostic, Note
from .habits import find_habit
from .source import Source
from .tree import Name

MOST = 4
"""How many alternatives a message names."""

_OPERATORS = frozenset({"PLUS", "MINUS", "STAR", "SLASH", "AT"})
_VALUE = frozenset({"NAME", "NUMBER", "STRING", "LSQB", "LPAR", "MINUS"})
_PHRASES: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"USE", "MODEL", "OP", "NAME", "$END"}), "`use`, `model`, `op` or a section"),
    (frozenset({"INIT", "REPEAT", "IF", "ROUTE", "NAME"}), "a statement"),
    (frozenset({"REPEAT", "IF", "ROUTE", "NAME"}), "a statement"),
    (_VALUE, "a value"),
    (_VALUE - {"MINUS"}, "a value"),
    (_OPERATORS, "an operator"),
    (frozenset({"NAME"}), "a name"),
    (frozenset({"STRING"}), "a string"),
    (frozenset({"NUMBER"}), "a number"),
    *(
        (frozenset({terminal}), f"`{text}`")
        for terminal, text in {
            "OVER": "over", "FROM": "from", "AS": "as", "ELSE": "else", "LESS": "<",
            "TO": "to", "BY": "by",
            "DOTS": "..", "ARROW": "->", "TILDE": "~", "EQUAL": "=", "COMMA": ",",
            "LPAR": "(", "RPAR": ")", "LSQB": "[", "RSQB": "]", "LBRACE": "{", "RBRACE": "}",
        }.items()
    ),
)  # fmt: skip
"""Sets of terminals and their name, larger sets before their subsets; terminals that follow an
operand are not worth naming.
"""

_STRANGE = {
    ":": "a setting is written `key = value`",
    ";": "statements end with the line, without `;`",
    "%": "`%` belongs to a number, as in `5%`",
}
"""Characters that no word begins with, and the probable meaning."""


_BRANCH = (
    "a branch is written `if i < 2 { … } else { … }`, where `i` is the index of `repeat layers"
    " as i { … }`"
)
_REPEAT = "a repeat is written `repeat layers { … }`, or `repeat layers as i { … }`"
_ROUTE = "a route is written `route y to experts by top(y @ router[hidden -> experts], 2) { … }`"
_HEADS = {"IF": _BRANCH, "ELSE": _BRANCH, "REPEAT": _REPEAT, "ROUTE": _ROUTE}
"""How statements with braces are written, by the terminals that begin them."""


def explain(error: UnexpectedInput, source: Source) -> Diagnostic:
    """The diagnostic for a text that the grammar does not accept."""
    if habit := explain_habit(error, source):
        return habit
    if not isinstance(error, UnexpectedToken):
        return _strange_character(error, source)
    token = cast(Token, error.token)  # type: ignore[reportUnknownMemberType]
    if token.type != "$END":
        return _explain_token(error, token, source)
    # lark places the end where the last token is
    last = source.span(token.start_pos or 0, token.end_pos or 0)
    return Diagnostic(
        "E0104",
        f"expected {_list_expectations(error)}, found the end of the file",
        last,
        "after this",
    )


def explain_habit(error: UnexpectedInput, source: Source) -> Diagnostic | None:
    """The error where the text is written as in another language, else None."""
    before = _before(error)
    section = ""
    places: list[int] = []  # of braces, the last one first
    for number, part in enumerate(before):
        if isinstance(part, Token) and part.type == "LBRACE":
            section = str(before[number - 1])
            places.insert(0, cast(int, part.start_pos))
    return find_habit(source, (place_of(error), *places), section)


def place_of(error: UnexpectedInput) -> int:
    """The offset where the parser stopped."""
    if not isinstance(error, UnexpectedToken):
        return error.pos_in_stream or 0
    token = cast(Token, error.token)  # type: ignore[reportUnknownMemberType]
    if token.type == "$END":
        return token.end_pos or 0
    return token.start_pos or 0


def _strange_character(error: UnexpectedInput, source: Source) -> Diagnostic:
    """The mistake of a character that no word begins with."""
    place = place_of(error)
    character = source.text[place]
    words = f"the character U+{ord(character):04X}"
    if character.isprintable():
        words = f"`{character}`"
    help = _head(_before(error)) or _STRANGE.get(character, "")
    message = f"expected {_list_expectations(error)}, found {words}"
    return Diagnostic("E0104", message, source.span(place, place + 1), help=help)


def _explain_token(error: UnexpectedInput, token: Token, source: Source) -> Diagnostic:
    start = token.start_pos or 0
    span = source.span(start, start + len(token))
    before = _before(error)
    if forgotten := _forgotten_value(token, before, source):
        return forgotten
    accepts = _accepts(error)
    help = _help_with_statement(token, before) or _help_with_entry(token, before, accepts)
    message = f"expected {_list_expectations(error)}, found `{_short(token)}`"
    return Diagnostic("E0104", message, span, help=help)


def _before(error: UnexpectedInput) -> list[Any]:
    """Tokens and nodes that the parser had put together, the nearest last."""
    return _parser(error).parser_state.value_stack


def _head(before: list[Any]) -> str:
    """How a statement is written that has an error before its brace; "" if there is no such
    statement.
    """
    kinds = _kinds(before)
    if "LBRACE" not in kinds:
        return ""
    for kind in reversed(kinds):
        if kind == "LBRACE":
            break
        if kind in _HEADS:
            return _HEADS[kind]
    return ""


def _kinds(parts: list[Any]) -> list[str]:
    """The types of tokens; "" for nodes."""
    return [part.type if isinstance(part, Token) else "" for part in parts]


def _in_route(before: list[Any]) -> bool:
    """Whether the nearest open brace is a route's: `ROUTE name TO name BY call {`."""
    kinds = _kinds(before)
    brace = 0
    if "LBRACE" in kinds:
        brace = len(kinds) - 1 - kinds[::-1].index("LBRACE")
    return kinds[max(brace - 6, 0) : brace][:1] == ["ROUTE"]


def _is_stage(before: list[Any]) -> bool:
    """Whether a stage of ZeRO has begun, or the word `zero` probably means one."""
    if "ZERO" in _kinds(before[-3:]):
        return True
    return any(str(part) == "zero" for part in before[-2:] if isinstance(part, Name | Token))


def _forgotten_value(token: Token, before: list[Any], source: Source) -> Diagnostic | None:
    """`seq =`, and on the next line `steps = 10`: the second `=` is where the parser notices."""
    match before:
        case [*_, Name(), Token(type="EQUAL") as equal, Name() as value] if token.type == "EQUAL":
            if value.span.line == equal.line:
                return None
            span = source.span(equal.start_pos or 0, equal.end_pos or 0)
            notes = (Note(value.span, "found here"),)
            return Diagnostic("E0104", f"expected a value, found `{value} =`", span, notes=notes)
        case _:
            return None


def _help_with_statement(token: Token, before: list[Any]) -> str:
    """Help for a token in a branch, a route, a repeat or a stage of ZeRO; "" elsewhere."""
    match before, token.type:
        case [*_, Name() | Token(type="NAME") as name], "LBRACE" if str(name) == "else":
            return (
                "`else` comes after the `}` of its `if`; write `else if` as `else { if … { … } }`"
            )
        case [*_, Token(type="ELSE")], "IF":
            return "put a branch inside the other one into its braces: `else { if … { … } }`"
        case [*_, (Name() as word,)], _ if str(word).upper() in _HEADS and _in_route(before):
            return f"experts compute by `name = …` alone; `{word}` belongs around the route"
        case _ if head := _head(before):
            return head
        case _ if _is_stage(before):
            return "a stage of ZeRO, from 0 to 3, is written `zero 1 over dp`"
        case _:
            return ""


def _help_with_entry(token: Token, before: list[Any], accepts: Set[str]) -> str:
    """Help for a token in a section, a setting or a rule, by the terminals that the parser
    accepts in its place; "" elsewhere.
    """
    match before, token.type:
        case [
            *_,
            Name() | Token(type="NAME") as first,
            Name() | Token(type="NAME") as second,
        ], kind if accepts == {"LBRACE"} and kind != "EQUAL":
            if str(second) == "every":
                return f"`{first} every 100`: a number of steps comes after `every`"
            return (
                f"a rule is written `{first} over {second}`, a section `{first} {second} {{ … }}`"
            )
        case [*_, Name() | Token(type="NAME") as name], "NUMBER" | "STRING" if "EQUAL" in accepts:
            return f"a setting is written `{name} = {_short(token)}`"
        case _, "NUMBER" if accepts == {"NAME"}:
            return "dims go by name, with sizes in `dims { … }`; tensors have no index"
        case _, "COMMA" if "RBRACE" in accepts:
            return "entries are separated by spaces or line ends"
        case _, "OVER":
            return "rules belong in a section: `shard { batch over dp }`"
        case [*_, Name() | Token(type="NAME") as name], "EQUAL" if accepts == {"NAME", "LBRACE"}:
            return f"a section is expected here: `{name} {{ … }}`"
        case _ if accepts == {"STRING"}:
            return 'as in `use "models/llama.scale"`'
        case _ if accepts == {"TILDE"} or accepts == {"TILDE", "COMMA"}:
            return "as in `init ~ normal(0.02)` or `init wo, w_down ~ normal(0.01)`"
        case _:
            return ""


def _accepts(error: UnexpectedInput) -> Set[str]:
    return _parser(error).accepts()


def _parser(error: UnexpectedInput) -> Any:
    parser: Any = getattr(error, "interactive_parser", None)
    assert parser, "mistakes: an error without the parser's state"
    return parser


def _list_expectations(error: UnexpectedInput) -> str:
    left = set(_accepts(error))
    phrases: list[str] = []
    for terminals, phrase in _PHRASES:
        if terminals <= left:
            left -= terminals
            phrases.append(phrase)
    if len(phrases) > MOST:
        phrases = [phrase for phrase in phrases if phrase != "an operator"][:MOST]
    *head, last = phrases
    return f"{', '.join(head)} or {last}" if head else last


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"
