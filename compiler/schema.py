"""The generic side of `settings`: how values are written, one reader and one printer for every section.

Purpose: `read(cls, section, found)` with a diagnostic for each mistake, and `show(instance)`, its inverse.
Non-goals: knowing any particular section.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, TypeVar

from attrs import NOTHING, Attribute, field, fields, frozen

from . import syntax
from .diagnostics import Diagnostic, Diagnostics, Note, PlanError, did_you_mean, listing
from .source import Span

MAX_COUNT = 2**63 - 1


@frozen
class Settings:
    """Base of all sections; `spans` says where each setting was set, or the section's head if it was not."""

    SECTION: ClassVar[str]
    spans: Mapping[str, Span] = field(factory=dict[str, Span], kw_only=True, eq=False, repr=False)


S = TypeVar("S", bound=Settings)

# ---- what a field's metadata says: one of these under _WHAT, and under _ONLY the headings that have the field

_WHAT, _ONLY = "what", "only"
Metadata = dict[str, Any]


@frozen
class Value:
    """A setting: how its value is read, with PlanError for what does not fit, and shown."""

    doc: str
    read: Callable[[syntax.Setting], Any]
    show: Callable[[Any], str]


@frozen
class Heading:
    """What stands behind the section's kind: `adamw` of `optimizer adamw`; without choices, any name."""

    choices: tuple[str, ...]


@frozen
class Part:
    """A section within the section, several of them, or one that is written as a call."""

    of: type[Settings]
    form: Literal["section", "sections", "call"]


def heading(*choices: str) -> Metadata:
    """The name of the section."""
    return {_WHAT: Heading(choices)}


def section(of: type[Settings]) -> Metadata:
    """One section in it."""
    return {_WHAT: Part(of, "section")}


def sections(of: type[Settings]) -> Metadata:
    """Any number of sections in it."""
    return {_WHAT: Part(of, "sections")}


def call(of: type[Settings]) -> Metadata:
    """A section written as a call: `schedule = cosine(warmup=20)`."""
    return {_WHAT: Part(of, "call")}


def only(variant: str, metadata: Metadata) -> Metadata:
    """A field that only sections of this heading have."""
    return {**metadata, _ONLY: variant}


# ---- how values are written


@frozen
class Bound:
    """A range of numbers and its name."""

    text: str
    holds: Callable[[float], bool]


POSITIVE = Bound("above 0", lambda number: number > 0)
NOT_NEGATIVE = Bound("at least 0", lambda number: number >= 0)
FRACTION = Bound("at least 0 and below 1", lambda number: 0 <= number < 1)


def count(doc: str, at_least: int = 0) -> Metadata:
    """An integer."""
    bound = Bound(f"at least {at_least} and below 2^63", lambda number: at_least <= number <= MAX_COUNT)

    def read(setting: syntax.Setting) -> int:
        number = _number(setting, setting.value, "an integer")
        if isinstance(number, float):
            raise _unfit(setting, setting.value, "an integer")
        return int(_within(bound, number, setting, setting.value))

    return {_WHAT: Value(doc, read, str)}


def real(doc: str, bound: Bound) -> Metadata:
    """A number."""
    return {_WHAT: Value(doc, lambda setting: _real(setting, setting.value, bound), repr)}


def pair(doc: str, bound: Bound) -> Metadata:
    """Two numbers: `[0.9, 0.95]`."""

    def read(setting: syntax.Setting) -> tuple[float, float]:
        match setting.value:
            case syntax.List(items=(first, second)):
                return _real(setting, first, bound), _real(setting, second, bound)
            case other:
                raise _unfit(setting, other, "two numbers, as in `[0.9, 0.95]`")

    return {_WHAT: Value(doc, read, lambda numbers: f"[{numbers[0]!r}, {numbers[1]!r}]")}


def share(doc: str) -> Metadata:
    """A part of the whole: `5%` or `0.05`."""

    def read(setting: syntax.Setting) -> float:
        match setting.value:
            case syntax.Number(value=value, unit="%"):
                return _within(FRACTION, value / 100, setting, setting.value)
            case other:
                return _real(setting, other, FRACTION)

    return {_WHAT: Value(doc, read, repr)}


def choice(doc: str, *choices: str) -> Metadata:
    """One of a few words."""

    def read(setting: syntax.Setting) -> str:
        match setting.value:
            case syntax.Name(name=name) if name in choices:
                return name
            case syntax.Name(name=name):
                help = did_you_mean(name, choices) or f"it is one of {listing(choices)}"
                raise _error("E0404", f"`{setting.key}` cannot be `{name}`", setting.value.span, help)
            case other:
                raise _unfit(setting, other, f"one of {listing(choices)}")

    return {_WHAT: Value(doc, read, str)}


def word(doc: str) -> Metadata:
    """A name, in quotes where it is not made of letters, digits and underscores."""

    def read(setting: syntax.Setting) -> str:
        match setting.value:
            case syntax.Name(name=text) | syntax.String(value=text):
                return text
            case other:
                raise _unfit(setting, other, "a name")

    return {
        _WHAT: Value(doc, read, lambda text: text if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text) else _quoted(text))
    }


def texts(doc: str, named: tuple[str, ...] = ()) -> Metadata:
    """A list of strings, and of names that stand for something."""

    def item(setting: syntax.Setting, expr: syntax.Expr) -> str:
        match expr:
            case syntax.Name(name=text) if text in named:
                return text
            case syntax.String(value=text) if text in named:
                raise _error(
                    "E0404",
                    f"`{text}` without quotes has a meaning of its own",
                    expr.span,
                    f'a file of this name is `"./{text}"`',
                )
            case syntax.String(value=text):
                return text
            case other:
                raise _unfit(setting, other, "strings" + "".join(f" or `{name}`" for name in named))

    def read(setting: syntax.Setting) -> tuple[str, ...]:
        match setting.value:
            case syntax.List(items=(_, *_) as items):
                return tuple(item(setting, expr) for expr in items)
            case syntax.List() as empty:
                raise _error("E0405", f"`{setting.key}` is empty", empty.span)
            case other:
                raise _unfit(setting, other, 'a list, as in `["corpus/*.txt"]`')

    def shown(items: tuple[str, ...]) -> str:
        return f"[{', '.join(text if text in named else _quoted(text) for text in items)}]"

    return {_WHAT: Value(doc, read, shown)}


def _real(setting: syntax.Setting, expr: syntax.Expr, bound: Bound) -> float:
    return float(_within(bound, _number(setting, expr, "a number"), setting, expr))


def _number(setting: syntax.Setting, expr: syntax.Expr, what: str) -> int | float:
    match expr:
        case syntax.Number(value=value, unit=""):
            return value
        case syntax.Negative(value=syntax.Number(value=value, unit="")):
            return -value
        case other:
            raise _unfit(setting, other, what)


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


def _unfit(setting: syntax.Setting, expr: syntax.Expr, what: str) -> PlanError:
    match expr:
        case syntax.Number(value=value, unit=unit):
            found = f"`{value}{unit}`"
        case _:
            found = _NOUNS.get(type(expr), "an expression")
    return _error("E0404", f"`{setting.key}` takes {what}, not {found}", expr.span)


def _error(code: str, message: str, span: Span, help: str = "") -> PlanError:
    return PlanError([Diagnostic(code, message, span, help=help)])


# ---- reading


def read(cls: type[S], section: syntax.Section, found: Diagnostics) -> S | None:
    """The settings in `section`; None if there are mistakes, which are added to `found`."""
    return _Reader(cls, section, found).read()


class _Reader:
    """Reads one section."""

    def __init__(self, cls: type[Settings], section: syntax.Section, found: Diagnostics) -> None:
        self._cls = cls
        self._section = section
        self._found = found
        self._title = " ".join(map(str, filter(None, (section.kind, section.name))))
        self._fields = {_key(field): field for field in _settings(cls)}
        self._values: dict[str, Any] = {}
        self._spans = {field.name: section.head for field in _settings(cls)}
        self._first: dict[str, Span] = {}
        self._failed = False

    def read(self) -> Any:
        self._heading()
        if self._failed:
            return None
        for entry in self._section.entries:
            try:
                self._entry(entry)
            except PlanError as error:
                self._found.add(error)
                self._failed = True
        self._missing()
        return None if self._failed else self._cls(**self._values, spans=self._spans)

    def _heading(self) -> None:
        name, kind = self._section.name, self._section.kind
        field = next((field for field in _settings(self._cls) if isinstance(_what(field), Heading)), None)
        if not field and name:
            self._fail("E0406", f"`{kind}` takes no name", name.span)
        if not field:
            return
        choices = _what(field).choices
        if not name:
            form = f"{kind} {choices[0] if choices else 'NAME'} {{ … }}"
            self._fail("E0406", f"`{kind}` needs a name", kind.span, f"write `{form}`")
        elif choices and name.name not in choices:
            help = did_you_mean(name.name, choices) or f"it is one of {listing(choices)}"
            self._fail("E0404", f"there is no {kind} `{name}`", name.span, help)
        else:
            self._values[field.name] = name.name
            self._spans[field.name] = name.span

    def _entry(self, entry: syntax.Entry) -> None:
        match entry:
            case syntax.Rule():
                raise _error(
                    "E0406", f"`{self._title}` has settings, not rules", entry.span, "a setting is `key = value`"
                )
            case syntax.Section(kind=key) | syntax.Setting(key=key):
                field = self._field(key)
        what = _what(field)
        many = isinstance(what, Part) and what.form == "sections"
        self._once(entry, f"{key} {entry.name}" if many and isinstance(entry, syntax.Section) else key.name)
        match what, entry:
            case Value(), syntax.Setting():
                value = what.read(entry)
            case Part(form="call"), syntax.Setting():
                value = read(what.of, _as_section(entry), self._found)
            case Part(), syntax.Section() if what.form != "call":
                value = read(what.of, entry, self._found)
            case Part(), _ if what.form != "call":
                raise _error("E0406", f"`{key}` is a section", entry.span, f"write `{_example(what.of)}`")
            case _:
                raise _error("E0406", f"`{key}` is a setting", key.span, f"write `{key} = …`")
        self._failed = self._failed or value is None
        self._values[field.name] = (*self._values.get(field.name, ()), value) if many else value
        self._spans[field.name] = entry.span

    def _field(self, key: syntax.Name) -> "Attribute[Any]":
        field = self._fields.get(key.name)
        if not field or isinstance(_what(field), Heading):
            keys = [name for name, field in self._fields.items() if self._applies(field)]
            help = did_you_mean(key.name, keys) or f"there are {listing(keys)}"
            raise _error("E0401", f"`{self._title}` has no setting `{key}`", key.span, help)
        if not self._applies(field):
            owner = f"{self._section.kind} {field.metadata[_ONLY]}"
            raise _error("E0401", f"`{key}` is a setting of `{owner}`, not of `{self._title}`", key.span)
        return field

    def _applies(self, field: "Attribute[Any]") -> bool:
        return not isinstance(_what(field), Heading) and _applies(field, str(self._section.name or ""))

    def _once(self, entry: syntax.Entry, key: str) -> None:
        first = self._first.setdefault(key, entry.span)
        if first is not entry.span:
            note = Note(first, "first here")
            raise PlanError([Diagnostic("E0403", f"`{key}` is given twice", entry.span, notes=(note,))])

    def _missing(self) -> None:
        for key, field in self._fields.items():
            what = _what(field)
            if field.default is not NOTHING or isinstance(what, Heading) or key in self._first:
                continue
            help = f"{key}: {what.doc}" if isinstance(what, Value) else f"write `{_example(what.of)}`"
            self._fail("E0402", f"`{self._title}` needs `{key}`", self._section.head, help)

    def _fail(self, code: str, message: str, span: Span, help: str = "") -> None:
        self._found.error(code, message, span, help=help)
        self._failed = True


def _as_section(setting: syntax.Setting) -> syntax.Section:
    """`schedule = cosine(warmup=20)` as if it were `schedule cosine { warmup = 20 }`."""
    match setting.value:
        case syntax.Name() as name:
            return syntax.Section(setting.key, name, (), setting.span)
        case syntax.Call(name=name, args=(), kwargs=entries):
            return syntax.Section(setting.key, name, entries, setting.span)
        case syntax.Call(args=(first, *_)):
            raise _error("E0404", "arguments are given by name here", first.span, "write `key=value`")
        case other:
            raise _unfit(setting, other, "a name or a call")


# ---- showing


def show(instance: Settings) -> str:
    """The settings as plan text, which reads back to an equal instance."""
    return "\n".join(_lines(instance))


def _lines(instance: Settings) -> Iterator[str]:
    name = _heading(instance)
    yield f"{instance.SECTION} {name} {{" if name else f"{instance.SECTION} {{"
    for field in _shown(instance):
        yield from (f"  {line}" for line in _entry_lines(field, getattr(instance, field.name)))
    yield "}"


def _entry_lines(field: "Attribute[Any]", value: Any) -> Iterator[str]:
    match _what(field):
        case Value(show=show):
            yield f"{field.name} = {show(value)}"
        case Part(form="call"):
            yield f"{field.name} = {_as_call(value)}"
        case Part(form="section"):
            yield from _lines(value)
        case _:
            for part in value:
                yield from _lines(part)


def _as_call(instance: Settings) -> str:
    arguments = (f"{field.name}={_what(field).show(getattr(instance, field.name))}" for field in _shown(instance))
    return f"{_heading(instance)}({', '.join(arguments)})"


def _heading(instance: Settings) -> str:
    return next((getattr(instance, f.name) for f in _settings(type(instance)) if isinstance(_what(f), Heading)), "")


def _shown(instance: Settings) -> Iterator["Attribute[Any]"]:
    name = _heading(instance)
    return (f for f in _settings(type(instance)) if _applies(f, name) and not isinstance(_what(f), Heading))


# ---- fields


def _settings(cls: type[Settings]) -> list["Attribute[Any]"]:
    return [field for field in fields(cls) if _WHAT in field.metadata]


def _what(field: "Attribute[Any]") -> Value | Heading | Part:
    return field.metadata[_WHAT]


def _applies(field: "Attribute[Any]", heading: str) -> bool:
    return field.metadata.get(_ONLY, heading) == heading


def _key(field: "Attribute[Any]") -> str:
    """What a plan calls the field: `group` what the instance has as `groups`."""
    what = _what(field)
    return what.of.SECTION if isinstance(what, Part) else field.name


def _example(of: type[Settings]) -> str:
    first = next((_what(f) for f in _settings(of) if isinstance(_what(f), Heading)), Heading(()))
    assert isinstance(first, Heading)
    return f"{of.SECTION} {first.choices[0] if first.choices else 'NAME'} {{ … }}"
