"""What a field of a class of `settings` can be, and how its values are written.

Purpose: each kind of value with its reading, its range and its showing in one place.
Non-goals: whole sections (`schema`), and any particular setting (`settings`).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import attrs
from attrs import frozen

from . import syntax
from .diagnostics import Diagnostic, PlanError, listing
from .source import Span


@frozen
class Settings:
    """Base of all sections; `spans` says where each setting was set, or the section's head if it was not."""

    SECTION: ClassVar[str]
    spans: Mapping[str, Span] = attrs.field(factory=dict[str, Span], kw_only=True, eq=False, repr=False)


# ---- what a field can be


@frozen
class Value:
    """A setting: how its value is read, with PlanError for what does not fit, and how it is shown."""

    doc: str
    read: Callable[[syntax.Setting], Any]
    show: Callable[[Any], str]


@frozen
class Part:
    """A section within the section, any number of them, or one that is written as a call."""

    of: type[Settings]
    form: Literal["section", "sections", "call"]

    @property
    def example(self) -> str:
        """How such a section begins."""
        heading = heading_of(self.of)
        return " ".join(filter(None, (self.of.SECTION, heading and heading.example, "{ … }")))


@frozen
class Heading:
    """The name behind the section's kind, `adamw` of `optimizer adamw`, and the field that holds it."""

    field: str
    choices: tuple[str, ...]
    """Empty if it may be any name."""

    @property
    def example(self) -> str:
        """A name that could stand there."""
        return self.choices[0] if self.choices else "NAME"


@frozen
class Field:
    """A field as `schema` sees it."""

    name: str
    what: Value | Part
    variant: str
    """The heading that alone has it, "" if all have."""
    required: bool
    first: bool
    """Whether a call may give it without its name."""

    @property
    def key(self) -> str:
        """What a plan calls it: `group` what the instance has as `groups`."""
        return self.what.of.SECTION if isinstance(self.what, Part) else self.name

    def belongs(self, heading: str) -> bool:
        """Whether sections of this heading have it."""
        return self.variant in ("", heading)


Metadata = dict[str, Any]
WHAT, VARIANT, CHOICES, FIRST = "what", "variant", "choices", "first"


def fields_of(cls: type[Settings]) -> list[Field]:
    """The fields of a class but for its heading, as declared."""
    return [
        Field(
            field.name,
            field.metadata[WHAT],
            field.metadata.get(VARIANT, ""),
            field.default is attrs.NOTHING,
            field.metadata.get(FIRST, False),
        )
        for field in attrs.fields(cls)
        if WHAT in field.metadata
    ]


def heading_of(cls: type[Settings]) -> Heading | None:
    """The heading of a class, if its sections have one."""
    headings = (
        Heading(field.name, field.metadata[CHOICES]) for field in attrs.fields(cls) if CHOICES in field.metadata
    )
    return next(headings, None)


def heading(*choices: str) -> Metadata:
    """The name of the section; without choices, any."""
    return {CHOICES: choices}


def section(of: type[Settings]) -> Metadata:
    """One section in it."""
    return {WHAT: Part(of, "section")}


def sections(of: type[Settings]) -> Metadata:
    """Any number of sections in it."""
    return {WHAT: Part(of, "sections")}


def call(of: type[Settings]) -> Metadata:
    """A section written as a call: `schedule = cosine(warmup=20)`."""
    return {WHAT: Part(of, "call")}


def only(variant: str, metadata: Metadata) -> Metadata:
    """A field that only sections of this heading have."""
    return {**metadata, VARIANT: variant}


def first(metadata: Metadata) -> Metadata:
    """A field that a call gives without its name: `file("rows.csv")`."""
    return {**metadata, FIRST: True}


# ---- how values are written


@frozen
class Bound:
    """A range of numbers and its name."""

    text: str
    holds: Callable[[float], bool]


SOMETHING = Bound("at least 1", lambda number: number >= 1)
POSITIVE = Bound("above 0", lambda number: number > 0)
NOT_NEGATIVE = Bound("at least 0", lambda number: number >= 0)
INT64 = Bound("below 2^63", lambda number: number < 2**63)
FRACTION = Bound("at least 0 and below 1", lambda number: 0 <= number < 1)
TOKEN = Bound("an id from 0 to 2^32 - 1", lambda number: 0 <= number < 2**32 and number % 1 == 0)
SOME = Bound("above 0 and below 1", lambda number: 0 < number < 1)


def count(doc: str, at_least: int = 0) -> Metadata:
    """An integer."""
    bound = Bound(f"at least {at_least}", lambda number: number >= at_least)

    def read(setting: syntax.Setting) -> int:
        number = _number(setting, setting.value, "an integer")
        if isinstance(number, float):
            raise unfit(setting, setting.value, "an integer")
        _within(INT64, number, setting, setting.value)
        _within(bound, number, setting, setting.value)
        return number

    return {WHAT: Value(doc, read, str)}


def counts(doc: str) -> Metadata:
    """A list of integers: `[9, 10, 10, 9]`."""

    def item(setting: syntax.Setting, expr: syntax.Expr) -> int:
        number = _within(INT64, _number(setting, expr, "integers"), setting, expr)
        if isinstance(number, float):
            raise unfit(setting, expr, "integers")
        return int(_within(NOT_NEGATIVE, number, setting, expr))

    def read(setting: syntax.Setting) -> tuple[int, ...]:
        match setting.value:
            case syntax.List(items=(_, *_) as items):
                return tuple(item(setting, expr) for expr in items)
            case other:
                raise unfit(setting, other, "a list of integers, as in `[9, 10, 10, 9]`")

    return {WHAT: Value(doc, read, lambda numbers: f"[{', '.join(map(str, numbers))}]")}


def real(doc: str, bound: Bound) -> Metadata:
    """A number."""
    return {WHAT: Value(doc, lambda setting: _real(setting, setting.value, bound), repr)}


def pair(doc: str, bound: Bound) -> Metadata:
    """Two numbers: `[0.9, 0.95]`."""

    def read(setting: syntax.Setting) -> tuple[float, float]:
        match setting.value:
            case syntax.List(items=(first, second)):
                return _real(setting, first, bound), _real(setting, second, bound)
            case other:
                raise unfit(setting, other, "two numbers, as in `[0.9, 0.95]`")

    return {WHAT: Value(doc, read, lambda numbers: f"[{numbers[0]!r}, {numbers[1]!r}]")}


def share(doc: str, bound: Bound = FRACTION) -> Metadata:
    """A part of the whole: `5%` or `0.05`."""

    def read(setting: syntax.Setting) -> float:
        match setting.value:
            case syntax.Number(value=value, unit="%"):
                return _within(bound, value / 100, setting, setting.value)
            case other:
                return _real(setting, other, bound)

    return {WHAT: Value(doc, read, repr)}


UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}


def size(doc: str) -> Metadata:
    """A number of bytes: `25MiB`."""

    def read(setting: syntax.Setting) -> int:
        match setting.value:
            case syntax.Number(value=int(), unit=unit) as number if number.value > 0 and unit in UNITS:
                return _bytes(setting, number)
            case other:
                help = f"a size is a whole number above 0 and one of {listing(UNITS)}"
                raise unfit(setting, other, "a size, as in `25MiB`", help)

    return {WHAT: Value(doc, read, _sized)}


@frozen
class Size:
    """A number of bytes where a number without unit counts something else."""

    bytes: int


def count_or_size(doc: str) -> Metadata:
    """An integer, at least 1, or a number of bytes."""

    def read(setting: syntax.Setting) -> int | Size:
        match setting.value:
            case syntax.Number(value=int(), unit=unit) as number if number.value > 0 and unit in UNITS:
                return Size(_bytes(setting, number))
            case other:
                what = "an integer or a size, as in `40GiB`"
                number = _within(INT64, _number(setting, other, what), setting, other)
                if isinstance(number, float):
                    raise unfit(setting, other, what)
                return int(_within(SOMETHING, number, setting, other))

    return {WHAT: Value(doc, read, lambda it: _sized(it.bytes) if isinstance(it, Size) else str(it))}


def _bytes(setting: syntax.Setting, number: syntax.Number) -> int:
    return int(_within(INT64, number.value * UNITS[number.unit], setting, number))


def _sized(bytes: int) -> str:
    unit = next(unit for unit, size in UNITS.items() if bytes % size == 0)
    return f"{bytes // UNITS[unit]}{unit}"


def token(doc: str) -> Metadata:
    """A token: its id, or, where tokens are bytes, the character of a byte."""

    def read(setting: syntax.Setting) -> int | str:
        match setting.value:
            case syntax.String(value=text) if len(text.encode()) == 1:
                return text
            case syntax.String(value=text) as string:
                raise _error("E0404", f"`{setting.key}` is one byte, not {len(text.encode())}", string.span)
            case other:
                number = _number(setting, other, 'a token, as 103 or "\\n"')
                return int(_within(TOKEN, number, setting, other))

    return {WHAT: Value(doc, read, lambda token: _quoted(token) if isinstance(token, str) else str(token))}


def choice(doc: str, *choices: str) -> Metadata:
    """One of a few words."""

    def read(setting: syntax.Setting) -> str:
        match setting.value:
            case syntax.Name(name=name) if name in choices:
                return name
            case syntax.Name(name=name):
                help = f"it is one of {listing(choices)}"
                raise _error("E0404", f"`{setting.key}` cannot be `{name}`", setting.value.span, help)
            case other:
                raise unfit(setting, other, f"one of {listing(choices)}")

    return {WHAT: Value(doc, read, str)}


@frozen
class Selection:
    """A word, and the number and the names that it was given as in a call."""

    word: str
    names: tuple[str, ...] = ()
    number: int = 0

    def __str__(self) -> str:
        given = [*([str(self.number)] if self.number else []), *self.names]
        return f"{self.word}({', '.join(given)})" if given else self.word


def selection(doc: str, *words: str, of: str, each: str) -> Metadata:
    """One of a few words, the word `of` with names, `selective(attention)`, or `each` with a number and a name."""
    listed = listing((*words, f"{of}(…)", f"{each}(2, …)"))

    def read(setting: syntax.Setting) -> Selection:
        match setting.value:
            case syntax.Name(name=name) if name in words:
                return Selection(name)
            case syntax.Call(name=syntax.Name(name=name), args=(_, *_) as args, kwargs=()) if name == of:
                return Selection(of, tuple(dict.fromkeys(_name(setting, expr) for expr in args)))
            case syntax.Call(
                name=syntax.Name(name=name),
                args=(syntax.Number(value=int() as number, unit=""), syntax.Name(name=dim)),
                kwargs=(),
            ) if name == each and number > 0:
                return Selection(each, (dim,), number)
            case syntax.Name(name=name) | syntax.Call(name=syntax.Name(name=name)) as other if name == each:
                help = f"write `{each}(2, layers)`: of every second turn of the repeat over `layers`"
                raise _error("E0404", f"`{each}` takes a number and the dim of a repeat", other.span, help)
            case syntax.Name(name=name) | syntax.Call(name=syntax.Name(name=name)) as other if name == of:
                raise _error("E0404", f"`{of}` names nothing", other.span, f"write `{of}(…)` with names in it")
            case syntax.Name(name=name) as other:
                raise _error("E0404", f"`{setting.key}` cannot be `{name}`", other.span, f"it is one of {listed}")
            case other:
                raise unfit(setting, other, f"one of {listed}")

    return {WHAT: Value(doc, read, str)}


def _name(setting: syntax.Setting, expr: syntax.Expr) -> str:
    if isinstance(expr, syntax.Name):
        return expr.name
    raise unfit(setting, expr, "names")


def word(doc: str) -> Metadata:
    """A name, in quotes where it is not made of letters, digits and underscores."""

    def read(setting: syntax.Setting) -> str:
        match setting.value:
            case syntax.Name(name=text) | syntax.String(value=text):
                return text
            case other:
                raise unfit(setting, other, "a name")

    def shown(text: str) -> str:
        return text if re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", text) else _quoted(text)

    return {WHAT: Value(doc, read, shown)}


def text(doc: str) -> Metadata:
    """A string."""

    def read(setting: syntax.Setting) -> str:
        match setting.value:
            case syntax.String(value=""):
                raise _error("E0405", f"`{setting.key}` is empty", setting.value.span)
            case syntax.String(value=found):
                return found
            case other:
                raise unfit(setting, other, "a string")

    return {WHAT: Value(doc, read, _quoted)}


def texts(doc: str, named: tuple[str, ...] = ()) -> Metadata:
    """A list of strings, and of names that stand for something."""

    def item(setting: syntax.Setting, expr: syntax.Expr) -> str:
        match expr:
            case syntax.Name(name=text) if text in named:
                return text
            case syntax.String(value=text) if text in named:
                help = f'write `{text}`, or `"./{text}"` for a file of this name'
                raise _error("E0404", f"`{text}` stands without quotes", expr.span, help)
            case syntax.String(value=text):
                return text
            case other:
                raise unfit(setting, other, "strings" + "".join(f" or `{name}`" for name in named))

    def read(setting: syntax.Setting) -> tuple[str, ...]:
        match setting.value:
            case syntax.List(items=(_, *_) as items):
                return tuple(item(setting, expr) for expr in items)
            case syntax.List() as empty:
                raise _error("E0405", f"`{setting.key}` is empty", empty.span)
            case other:
                raise unfit(setting, other, 'a list, as in `["corpus/*.txt"]`')

    def shown(items: tuple[str, ...]) -> str:
        return f"[{', '.join(text if text in named else _quoted(text) for text in items)}]"

    return {WHAT: Value(doc, read, shown)}


def _real(setting: syntax.Setting, expr: syntax.Expr, bound: Bound) -> float:
    return float(_within(bound, _number(setting, expr, "a number"), setting, expr))


def _number(setting: syntax.Setting, expr: syntax.Expr, what: str) -> int | float:
    match expr:
        case syntax.Number(value=value, unit=""):
            return value
        case syntax.Negative(value=syntax.Number(value=value, unit="")):
            return -value
        case other:
            raise unfit(setting, other, what)


def _within(bound: Bound, number: float, setting: syntax.Setting, expr: syntax.Expr) -> float:
    if not bound.holds(number):
        raise _error("E0405", f"`{setting.key}` must be {bound.text}", expr.span)
    return number


def _quoted(text: str) -> str:
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"}
    return f'"{"".join(escapes.get(character, character) for character in text)}"'


_NOUNS: dict[type, str] = {
    syntax.Name: "a name",
    syntax.String: "a string",
    syntax.List: "a list",
    syntax.Call: "a call",
    syntax.ParamUse: "a parameter",
}


def unfit(setting: syntax.Setting, expr: syntax.Expr, what: str, help: str = "") -> PlanError:
    """The error for a value of the wrong type; `what` is the right one."""
    match expr:
        case syntax.Number(value=value, unit=unit):
            found = f"`{value}{unit}`"
        case _:
            found = _NOUNS.get(type(expr), "an expression")
    return _error("E0404", f"`{setting.key}` takes {what}, not {found}", expr.span, help)


def _error(code: str, message: str, span: Span, help: str = "") -> PlanError:
    return PlanError([Diagnostic(code, message, span, help=help)])
