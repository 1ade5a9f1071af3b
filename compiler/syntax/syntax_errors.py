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
"""Sets of terminals and their name, larger sets before what they hold; what follows an operand
is not worth naming.
"""

_STRANGE = {
    ":": "a setting is written `key = value`",
    ";": "statements end with the line, without `;`",
    "%": "`%` belongs to a number, as in `5%`",
}
"""Characters that no word begins with, and what whoever writes them probably means."""


_BRANCH = (
    "a branch is written `if i < 2 { … } else { … }`, where `i` is the index of `repeat layers"
    " as i { … }`"
)
_REPEAT = "a repeat is written `repeat layers { … }`, or `repeat layers as i { … }`"
_ROUTE = "a route is written `route y to experts by top(y @ router[hidden -> experts], 2) { … }`"
_HEADS = {"IF": _BRANCH, "ELSE": _BRANCH, "REPEAT": _REPEAT, "ROUTE": _ROUTE}
"""How statements with braces begin."""


def explain(error: UnexpectedInput, source: Source) -> Diagnostic:
    """The diagnostic for a text that the grammar does not accept."""
    if habit := explain_habit(error, source):
        return habit
    if not isinstance(error, UnexpectedToken):
        return _strange_character(error, source)
    token = cast(Token, error.token)  # type: ignore[reportUnknownMemberType]
    if token.type != "$END":
        return _unexpected(error, token, source)
    # lark places the end where the last token is
    last = source.span(token.start_pos or 0, token.end_pos or 0)
    return Diagnostic(
        "E0104", f"expected {_expected(error)}, found the end of the file", last, "after this"
    )


def explain_habit(error: UnexpectedInput, source: Source) -> Diagnostic | None:
    """The error where the text is written as in another language, else None."""
    before = _before(error)
    braces = [
        at for at, part in enumerate(before) if isinstance(part, Token) and part.type == "LBRACE"
    ]
    section = str(before[braces[-1] - 1]) if braces else ""
    places = (place_of(error), *(before[at].start_pos for at in reversed(braces)))
    return find_habit(source, places, section)


def place_of(error: UnexpectedInput) -> int:
    """The offset at which the parser stopped."""
    if not isinstance(error, UnexpectedToken):
        return error.pos_in_stream or 0
    token = cast(Token, error.token)  # type: ignore[reportUnknownMemberType]
    return (token.end_pos if token.type == "$END" else token.start_pos) or 0


def _strange_character(error: UnexpectedInput, source: Source) -> Diagnostic:
    at = place_of(error)
    character = source.text[at]
    shown = f"`{character}`" if character.isprintable() else f"the character U+{ord(character):04X}"
    help = _head(_before(error)) or _STRANGE.get(character, "")
    return Diagnostic(
        "E0104", f"expected {_expected(error)}, found {shown}", source.span(at, at + 1), help=help
    )


def _unexpected(error: UnexpectedInput, token: Token, source: Source) -> Diagnostic:
    start = token.start_pos or 0
    span = source.span(start, start + len(token))
    before = _before(error)
    if forgotten := _forgotten_value(token, before, source):
        return forgotten
    help = _help(token, before, _accepts(error))
    return Diagnostic(
        "E0104", f"expected {_expected(error)}, found `{_short(token)}`", span, help=help
    )


def _before(error: UnexpectedInput) -> list[Any]:
    """Tokens and nodes that the parser had put together, the nearest last."""
    return _parser(error).parser_state.value_stack


def _head(before: list[Any]) -> str:
    """How the statement is written that has an error in its part before the brace; "" if there
    is none.
    """
    kinds = [part.type if isinstance(part, Token) else "" for part in before]
    since = kinds[::-1][: kinds[::-1].index("LBRACE")] if "LBRACE" in kinds else []
    return next((_HEADS[kind] for kind in since if kind in _HEADS), "")


def _in_route(before: list[Any]) -> bool:
    """Whether the nearest open brace is a route's: `ROUTE name TO name BY call {`."""
    kinds = [part.type if isinstance(part, Token) else "" for part in before]
    opened = len(kinds) - 1 - kinds[::-1].index("LBRACE") if "LBRACE" in kinds else 0
    return kinds[max(opened - 6, 0) : opened][:1] == ["ROUTE"]


def _is_stage(before: list[Any]) -> bool:
    """Whether a stage of ZeRO has begun, or whoever wrote `zero` probably means one."""
    begun = any(isinstance(part, Token) and part.type == "ZERO" for part in before[-3:])
    return begun or any(
        str(part) == "zero" for part in before[-2:] if isinstance(part, Name | Token)
    )


def _forgotten_value(token: Token, before: list[Any], source: Source) -> Diagnostic | None:
    """`seq =`, and on the next line `steps = 10`: the second `=` is where the parser notices."""
    match before:
        case [*_, Name(), Token(type="EQUAL") as equal, Name() as value] if token.type == "EQUAL":
            if value.span.line == equal.line:
                return None
            at = source.span(equal.start_pos or 0, equal.end_pos or 0)
            notes = (Note(value.span, "found here"),)
            return Diagnostic("E0104", f"expected a value, found `{value} =`", at, notes=notes)
        case _:
            return None


def _help(token: Token, before: list[Any], accepts: Set[str]) -> str:
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


def _expected(error: UnexpectedInput) -> str:
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
