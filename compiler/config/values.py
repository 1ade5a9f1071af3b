"""The values of settings: how each kind is read and shown, its range, and the errors for values
that do not fit.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from ..syntax import tree
from ..syntax.diagnostics import PlanError, did_you_mean, listing, wrong
from ..syntax.synonyms import find_value, help_for_form

Json = Mapping[str, Any]
"""A JSON Schema of a value as `plan.json` has it (2020-12)."""


@frozen
class Bound:
    """A range of numbers, its name, and the same as JSON Schema says it."""

    text: str
    holds: Callable[[float], bool]
    json: Json = field(factory=dict[str, Any])


AT_LEAST_1 = Bound("at least 1", lambda number: number >= 1, {"minimum": 1})
POSITIVE = Bound("above 0", lambda number: number > 0, {"exclusiveMinimum": 0})
NOT_NEGATIVE = Bound("at least 0", lambda number: number >= 0, {"minimum": 0})
INT64 = Bound("below 2^63", lambda number: number < 2**63)
FRACTION = Bound(
    "at least 0 and below 1", lambda number: 0 <= number < 1, {"minimum": 0, "exclusiveMaximum": 1}
)
SOME = Bound(
    "above 0 and below 1",
    lambda number: 0 < number < 1,
    {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
)
TOKEN_ID = Bound("an id from 0 to 2^32 - 1", lambda number: 0 <= number < 2**32 and number % 1 == 0)

AUTO = "auto"
"""The setting that leaves a choice to the compiler."""

BY_MEMORY = (AUTO, "memory")
"""A choice and its bound."""

UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
POWERS = {"k": 1, "m": 2, "g": 3, "b": 3, "t": 4}
"""Letters for thousands, millions and so on, which may be those of 1000 or of 1024."""


def record(properties: Json, *required: str) -> dict[str, Any]:
    """The JSON Schema of an object that has these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*required],
        "additionalProperties": False,
    }


_NOUNS: dict[type, str] = {
    tree.Name: "a name",
    tree.Range: "a range",
    tree.String: "a string",
    tree.List: "a list",
    tree.Call: "a call",
    tree.ParamUse: "a parameter",
}


@frozen
class Value:
    """A kind of value: its description, how it is read, shown and bounded, and the help if a
    value does not fit.
    """

    takes: str
    parse: Callable[[tree.Name, tree.Expr], Any]
    """The value of an expression for a setting of this key; None if it is of another type."""
    show: Callable[[Any], str] = str
    bounds: tuple[Bound, ...] = ()
    to: Callable[[Any], Any] = lambda value: value
    """The value as an instance of settings has it."""
    help: Callable[[tree.Expr], str] = lambda _: ""
    json: Json = field(factory=dict[str, Any])
    """The JSON Schema of the value, but for its bounds."""

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON Schema of the value."""
        schema = {**self.json}
        for bound in self.bounds:
            schema.update(bound.json)
        return schema

    def get_value(self, key: tree.Name, expr: tree.Expr) -> Any:
        """The value of an expression.  Raises PlanError if it does not fit."""
        value = self.parse(key, expr)
        if value is None:
            raise unfit(key, expr, self.takes, self.help(expr) or help_for_form(key.name))
        for bound in self.bounds:
            if not bound.holds(value):
                message, help = f"`{key}` must be {bound.text}", help_for_form(key.name)
                raise wrong("E0405", message, expr.span, help=help)
        return self.to(value)


def unfit(key: tree.Name, expr: tree.Expr, takes: str, help: str = "") -> PlanError:
    """The error for a value of the wrong type; the setting `takes` another."""
    noun = _NOUNS.get(type(expr), "an expression")
    if isinstance(expr, tree.Number):
        noun = f"`{expr.span.words}`"
    return wrong("E0404", f"`{key}` takes {takes}, not {noun}", expr.span, help=help)


def help_for_digits(expr: tree.Expr) -> str:
    """Help for a whole number that is not written in digits; "" for others."""
    match expr:
        case tree.Number(value=value, unit=unit) if unit.casefold() in POWERS:
            power = POWERS[unit.casefold()]
            numbers = (value * 1024**power, value * 1000**power)
        case tree.Number(value=float() as value, unit=""):
            numbers = (value,)
        case _:
            return ""
    words = " or ".join(f"`{number:.0f}`" for number in numbers if number % 1 == 0)
    if not words:
        return ""
    return f"write {words}: a whole number is written in digits"


# ---- numbers


def _number(_: tree.Name, expr: tree.Expr) -> int | float | None:
    match expr:
        case tree.Number(value=value, unit=""):
            return value
        case tree.Negative(value=tree.Number(value=value, unit="")):
            return -value
        case _:
            return None


def _whole(key: tree.Name, expr: tree.Expr) -> int | None:
    number = _number(key, expr)
    return number if isinstance(number, int) else None


def _share(key: tree.Name, expr: tree.Expr) -> int | float | None:
    if isinstance(expr, tree.Number) and expr.unit == "%":
        return expr.value / 100
    return _number(key, expr)


_INTEGER, _REAL, _STRING = {"type": "integer"}, {"type": "number"}, {"type": "string"}


def whole(bound: Bound = NOT_NEGATIVE, takes: str = "an integer") -> Value:
    """An integer."""
    return Value(takes, _whole, bounds=(INT64, bound), help=help_for_digits, json=_INTEGER)


def real(bound: Bound, takes: str = "a number") -> Value:
    """A number."""
    return Value(takes, _number, repr, (bound,), float, json=_REAL)


def share(bound: Bound) -> Value:
    """A part of the whole: `5%` or `0.05`."""
    return Value("a number", _share, repr, (bound,), float, json=_REAL)


@frozen
class Size:
    """A number of bytes where a number without unit counts something else."""

    bytes: int


def _bytes(_: tree.Name, expr: tree.Expr) -> int | None:
    match expr:
        case tree.Number(value=int() as value, unit=unit) if value > 0 and unit in UNITS:
            return value * UNITS[unit]
        case _:
            return None


def _count_or_bytes(key: tree.Name, expr: tree.Expr) -> int | Size:
    if _bytes(key, expr) is None:
        return whole(AT_LEAST_1, COUNT_OR_BYTES.takes).get_value(key, expr)
    return Size(BYTES.get_value(key, expr))


def _size_text(size: int) -> str:
    unit = next(unit for unit, factor in UNITS.items() if size % factor == 0)
    return f"{size // UNITS[unit]}{unit}"


_SIZES = f"a size is a whole number above 0 and one of {listing(UNITS)}"
_IN_BYTES = _INTEGER | {"minimum": 1}
BYTES = Value(
    "a size, as in `25MiB`", _bytes, _size_text, (INT64,), help=lambda _: _SIZES, json=_IN_BYTES
)
COUNT_OR_BYTES = Value(
    "an integer or a size, as in `40GiB`",
    _count_or_bytes,
    lambda value: _size_text(value.bytes) if isinstance(value, Size) else str(value),
    json={"anyOf": [_IN_BYTES, record({"bytes": _IN_BYTES}, "bytes")]},
)


def _size_or_auto(key: tree.Name, expr: tree.Expr) -> int | str | None:
    if isinstance(expr, tree.Name) and expr.name == AUTO:
        return AUTO
    return None if _bytes(key, expr) is None else BYTES.get_value(key, expr)


BYTES_OR_AUTO = Value(
    f"a size, as in `25MiB`, or `{AUTO}`",
    _size_or_auto,
    lambda value: value if value == AUTO else _size_text(value),
    help=lambda _: _SIZES,
    json={"anyOf": [_IN_BYTES, {"const": AUTO}]},
)


@frozen
class Skip:
    """The rule `skip(10)`: a step is skipped if its loss is this many median deviations above
    the losses before it.
    """

    deviations: float

    def __str__(self) -> str:
        return f"{SKIP}({self.deviations!r})"


SKIP = "skip"


def _number_or_skip(key: tree.Name, expr: tree.Expr) -> float | Skip | None:
    match expr:
        case tree.Call(name=tree.Name(name=name), args=(deviations,), kwargs=()) if name == SKIP:
            return Skip(real(POSITIVE).get_value(key, deviations))
        case _ if _number(key, expr) is None:
            return None
        case _:
            return real(POSITIVE).get_value(key, expr)


_MOST = real(POSITIVE).schema
NUMBER_OR_SKIP = Value(
    f"a number or a rule, as in `{SKIP}(10)`",
    _number_or_skip,
    json={"anyOf": [_MOST, record({"deviations": _MOST}, "deviations")]},
)


# ---- lists


def list_of(item: Value, takes: str, length: int | None = None, empty: bool = False) -> Value:
    """A list of `length` items, or of one or more; with `empty`, an empty one has an error of
    its own.
    """

    def parse(key: tree.Name, expr: tree.Expr) -> tuple[Any, ...] | None:
        if empty and isinstance(expr, tree.List) and not expr.items:
            raise wrong("E0405", f"`{key}` is empty", expr.span)
        if isinstance(expr, tree.List) and expr.items and length in (None, len(expr.items)):
            return tuple(item.get_value(key, item_expr) for item_expr in expr.items)
        return None

    json = {"type": "array", "items": item.schema, "minItems": length or 1}
    if length is not None:
        json["maxItems"] = length
    return Value(takes, parse, lambda items: f"[{', '.join(map(item.show, items))}]", json=json)


def pair(bound: Bound) -> Value:
    """Two numbers."""
    return list_of(real(bound), "two numbers, as in `[0.9, 0.95]`", length=2)


COUNTS = list_of(whole(takes="integers"), "a list of integers, as in `[9, 10, 10, 9]`")


# ---- words


def one_of(*choices: str) -> Value:
    """One of a few words."""

    def parse(key: tree.Name, expr: tree.Expr) -> str | None:
        if not isinstance(expr, tree.Name):
            return None
        if expr.name not in choices:
            near = did_you_mean(find_value(key.name, expr.name), choices)
            help = near or help_for_form(key.name) or f"it is one of {listing(choices)}"
            raise wrong("E0404", f"`{key}` cannot be `{expr}`", expr.span, help=help)
        return expr.name

    return Value(f"one of {listing(choices)}", parse, json={"enum": [*choices]})


@frozen
class Selection:
    """A word, and the arguments of its call: a number, names, bytes of memory."""

    word: str
    names: tuple[str, ...] = ()
    number: int = 0
    memory: int | None = None

    def __str__(self) -> str:
        arguments: list[str] = []
        if self.number:
            arguments.append(str(self.number))
        arguments.extend(self.names)
        if self.memory is not None:
            arguments.append(f"memory={_size_text(self.memory)}")
        if not arguments:
            return self.word
        return f"{self.word}({', '.join(arguments)})"


def selection(*words: str, with_names: str, with_number: str) -> Value:
    """One of a few words, `with_names` with names, as `selective(attention)`, `with_number` with
    a number and names, or `auto`.
    """
    forms = _SelectionForms(words, with_names, with_number)
    properties = {
        "word": {"enum": [*words, with_names, with_number, AUTO]},
        "names": {"type": "array", "items": _STRING},
        "number": _INTEGER,
        "memory": {"anyOf": [_IN_BYTES, {"type": "null"}]},
    }
    return Value(f"one of {forms.choices}", forms.parse, json=record(properties, "word"))


@frozen
class _SelectionForms:
    """The forms of a selection: single words, a word with names, a word with a number and names."""

    words: tuple[str, ...]
    with_names: str
    with_number: str

    @property
    def choices(self) -> str:
        """All forms, as messages list them."""
        forms = (f"{self.with_names}(…)", f"{self.with_number}(2, …)", AUTO)
        return listing((*self.words, *forms))

    def parse(self, key: tree.Name, expr: tree.Expr) -> Selection | None:
        """The selection of an expression, None if it is of another type.

        Raises PlanError where it names a form and is not of this form.
        """
        match expr:
            case tree.Name(name=name):
                return self._word(key, name, expr)
            case tree.Call(name=tree.Name(name=name), args=args, kwargs=kwargs):
                return self._call(key, name, args, kwargs, expr)
            case _:
                return None

    def _word(self, key: tree.Name, name: str, expr: tree.Expr) -> Selection:
        if name in (*self.words, AUTO):
            return Selection(name)
        if error := self._wrong_arguments(name, expr):
            raise error
        help = did_you_mean(find_value(key.name, name), (*self.words, AUTO))
        help = help or f"it is one of {self.choices}"
        raise wrong("E0404", f"`{key}` cannot be `{name}`", expr.span, help=help)

    def _call(
        self,
        key: tree.Name,
        name: str,
        args: tuple[tree.Expr, ...],
        kwargs: tuple[tree.Setting, ...],
        expr: tree.Expr,
    ) -> Selection | None:
        match args, kwargs:
            case (), (memory,) if (name, memory.key.name) == BY_MEMORY:
                return Selection(AUTO, memory=BYTES.get_value(memory.key, memory.value))
            case (_, *_), () if name == self.with_names:
                return Selection(name, _names(key, args))
            case (tree.Number(value=int() as number, unit=""), tree.Name(), *_), () if (
                name == self.with_number and number > 0
            ):
                return Selection(name, _names(key, args[1:]), number)
            case _:
                pass
        if error := self._wrong_arguments(name, expr):
            raise error
        return None

    def _wrong_arguments(self, name: str, expr: tree.Expr) -> PlanError | None:
        """The error for a word that is not called as it must be; None for other words."""
        if name == AUTO:
            help = (
                f"write `{AUTO}(memory = 60GiB)`, or `{AUTO}` for the memory of the cluster's GPU"
            )
            return wrong("E0404", f"`{AUTO}` takes a number of bytes", expr.span, help=help)
        if name == self.with_number:
            help = f"write `{name}(2, layers)`: every second iteration of the repeat over `layers`"
            message = f"`{name}` takes a number and dims of repeats"
            return wrong("E0404", message, expr.span, help=help)
        if name == self.with_names:
            help = f"write `{name}(…)` with names in it"
            return wrong("E0404", f"`{name}` names nothing", expr.span, help=help)
        return None


_NAME = Value("names", lambda _, expr: expr.name if isinstance(expr, tree.Name) else None)


def _names(key: tree.Name, args: Sequence[tree.Expr]) -> tuple[str, ...]:
    """The names that are arguments of a call, each once."""
    return tuple(dict.fromkeys(_NAME.get_value(key, arg) for arg in args))


# ---- strings


def strings(*names: str) -> Value:
    """A list of strings, and of names with a meaning of their own."""

    def parse(key: tree.Name, expr: tree.Expr) -> str | None:
        match expr:
            case tree.String(value=text) if text in names:
                help = f'write `{text}`, or `"./{text}"` for a file of this name'
                raise wrong("E0404", f"write `{text}` without quotes", expr.span, help=help)
            case tree.String(value=text):
                return text
            case _:
                return expr.name if isinstance(expr, tree.Name) and expr.name in names else None

    takes = "strings" + "".join(f" or `{name}`" for name in names)
    item = Value(takes, parse, lambda text: text if text in names else _quote(text), json=_STRING)
    return list_of(item, 'a list, as in `["corpus/*.txt"]`', empty=True)


def _word(_: tree.Name, expr: tree.Expr) -> str | None:
    match expr:
        case tree.String(value=text):
            return text
        case tree.Name(name=name):
            return name
        case _:
            return None


def _text(key: tree.Name, expr: tree.Expr) -> str | None:
    if not isinstance(expr, tree.String):
        return None
    if not expr.value:
        raise wrong("E0405", f"`{key}` is empty", expr.span)
    return expr.value


def _token(key: tree.Name, expr: tree.Expr) -> int | str:
    if not isinstance(expr, tree.String):
        return int(real(TOKEN_ID, TOKEN.takes).get_value(key, expr))
    if len(expr.value.encode()) == 1:
        return expr.value
    raise wrong("E0404", f"`{key}` is one byte, not {len(expr.value.encode())}", expr.span)


def _quote(text: str) -> str:
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"}
    return f'"{"".join(escapes.get(character, character) for character in text)}"'


WORD = Value(
    "a name",
    _word,
    lambda text: text if re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", text) else _quote(text),
    json=_STRING,
)
"""A name, in quotes where it is not made of letters, digits and underscores."""

TEXT = Value("a string", _text, _quote, json=_STRING | {"minLength": 1})
"""A string that is not empty."""

TOKEN = Value(
    'a token, as 103 or "\\n"',
    _token,
    lambda token: _quote(token) if isinstance(token, str) else str(token),
    json={
        "anyOf": [
            _INTEGER | {"minimum": 0, "exclusiveMaximum": 2**32},
            _STRING | {"maxLength": 1, "minLength": 1},
        ]
    },
)
"""A token: its id, or, where tokens are bytes, the character of a byte."""
