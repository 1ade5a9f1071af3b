"""One reader and one printer for all sections of settings, and their JSON Schema.

`fields` says what a class has, `values` reads a value.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import attrs

from ..syntax import tree
from ..syntax.diagnostics import Diagnostics, Note, PlanError, did_you_mean, listing, nearest, wrong
from ..syntax.source import Span
from ..syntax.synonyms import help_for_heading, said_elsewhere, setting_meant
from .fields import Field, Part, Settings, fields_of, heading_of
from .settings import Cluster, Flow, Pipelining, Train, Watch
from .values import Selection, Size, Value, record, unfit

S = TypeVar("S", bound=Settings)

# ---- reading


def read(
    cls: type[S], section: tree.Section, found: Diagnostics, *checks: Callable[[S], object]
) -> S | None:
    """The settings in `section`; None if it or a check finds mistakes, which are added to
    `found`.
    """
    mistakes = Diagnostics()
    with found.catch():
        instance = _Reader(cls, section, mistakes).read()
        for check in checks:
            with mistakes.catch():
                check(instance)
        mistakes.check()
        return instance
    return None


class _Reader:
    """Reads one section."""

    def __init__(self, cls: type[Settings], section: tree.Section, found: Diagnostics) -> None:
        self._cls = cls
        self._section = section
        self._found = found
        self._title = f"{section.kind} {section.name}" if section.name else section.kind.name
        self._values: dict[str, Any] = {}
        self._spans: dict[str, Span] = {}
        self._first: dict[str, Span] = {}
        self._meant: set[str] = set()

    def read(self) -> Any:
        """The instance, worthless if there were mistakes."""
        self._heading()
        for entry in self._section.entries:
            with self._found.catch():
                self._entry(entry)
        for field in fields_of(self._cls):
            if field.required and field.key not in {*self._first, *self._meant}:
                help = (
                    f"write `{field.what.example}`"
                    if isinstance(field.what, Part)
                    else f"it is: {field.doc}"
                )
                self._found.error(
                    "E0402", f"`{self._title}` needs `{field.key}`", self._section.head, help=help
                )
        self._found.check()
        unset = {field.name: self._section.head for field in fields_of(self._cls)}
        return self._cls(**self._values, spans=unset | self._spans)

    def _heading(self) -> None:
        field, heading = heading_of(self._cls)
        kind, name = self._section.kind, self._section.name
        if heading is None:
            if name:
                self._found.error("E0406", f"`{kind}` takes no name", name.span)
            return
        if not name:
            help = f"write `{kind} {heading.example} {{ … }}`"
            raise wrong("E0406", f"`{kind}` needs a name", kind.span, help=help)
        if heading and name.name not in heading:
            help = help_for_heading(kind.name, name.name) or did_you_mean(name.name, heading)
            help = help or f"it is one of {listing(heading)}"
            raise wrong("E0404", f"there is no {kind} `{name}`", name.span, help=help)
        self._values[field] = name.name
        self._spans[field] = name.span

    def _entry(self, entry: tree.Entry) -> None:
        field = self._field(entry)
        many = isinstance(field.what, Part) and field.what.form == "sections"
        key = f"{field.key} {entry.name}" if many and isinstance(entry, tree.Section) else field.key
        if (first := self._first.setdefault(key, entry.span)) is not entry.span:
            raise wrong(
                "E0403", f"`{key}` is given twice", entry.span, notes=(Note(first, "first here"),)
            )
        value = self._value(field, entry)
        self._values[field.name] = (*self._values.get(field.name, ()), value) if many else value
        self._spans.setdefault(field.name, entry.span)

    def _field(self, entry: tree.Entry) -> Field:
        match entry:
            case tree.Section(kind=key) | tree.Setting(key=key):
                field = next(
                    (field for field in fields_of(self._cls) if field.key == key.name), None
                )
            case _:
                raise _wrong_form(
                    f"`{self._title}` has settings, not rules", entry, "a setting is `key = value`"
                )
        heading = str(self._section.name or "")
        if not field:
            raise self._unknown(
                key, [field.key for field in fields_of(self._cls) if field.belongs(heading)]
            )
        if not field.belongs(heading):
            message = (
                f"`{key}` is a setting of `{self._section.kind} {field.variant}`, not of"
                f" `{self._title}`"
            )
            raise wrong("E0401", message, key.span)
        return field

    def _unknown(self, key: tree.Name, keys: Sequence[str]) -> PlanError:
        """The error for an unknown setting; the one that it probably means counts as given."""
        word, near = setting_meant(key.name), nearest(key.name, keys)
        if word in keys:
            near, help = word, f"it is called {self._described(word)}"
        elif elsewhere := said_elsewhere(key.name):
            help = elsewhere
        elif example := _example(self._cls, word):
            help = f"write `{example}`"
        else:
            help = f"did you mean `{near}`?" if near else f"there are {listing(keys)}"
        self._meant.add(near)
        return wrong("E0401", f"`{self._title}` has no setting `{key}`", key.span, help=help)

    def _described(self, key: str) -> str:
        field = next(field for field in fields_of(self._cls) if field.key == key)
        return (
            f"`{key}`, as in `{field.what.example}`"
            if isinstance(field.what, Part)
            else f"`{key}`: {field.doc}"
        )

    def _value(self, field: Field, entry: tree.Entry) -> Any:
        match field.what, entry:
            case Value(), tree.Setting(every=True) if not field.every:
                raise _wrong_form(
                    f"`{field.key}` is not done every few steps", entry, f"write `{field.key} = …`"
                )
            case Value() as value, tree.Setting():
                return value.read(entry.key, entry.value)
            case Part(of=of, form="call"), tree.Setting():
                return read(of, _as_section(entry, of), self._found)
            case Part(of=of, form="section" | "sections"), tree.Section():
                return read(of, entry, self._found)
            case Part(form="section" | "sections") as part, _:
                raise _wrong_form(f"`{field.key}` is a section", entry, f"write `{part.example}`")
            case _:
                raise _wrong_form(f"`{field.key}` is a setting", entry, f"write `{field.key} = …`")


def _example(cls: type[Settings], key: str) -> str:
    """How `key` is written in a section within those of `cls` that has it; "" if none does."""
    parts = [field.what for field in fields_of(cls) if isinstance(field.what, Part)]
    for part in parts:
        for field in fields_of(part.of):
            if field.key == key:
                return part.example_of(field)
    return next(filter(None, (_example(part.of, key) for part in parts)), "")


def _wrong_form(message: str, entry: tree.Entry, help: str) -> PlanError:
    span = entry.head if isinstance(entry, tree.Section) else entry.span
    return wrong("E0406", message, span, help=help)


def _as_section(setting: tree.Setting, of: type[Settings]) -> tree.Section:
    """`schedule = cosine(warmup=20)` as if it were `schedule cosine { warmup = 20 }`."""
    match setting.value:
        case tree.Name() as name:
            return tree.Section(setting.key, name, (), setting.span)
        case tree.Call(name=name, args=args, kwargs=entries):
            first = [
                field.key for field in fields_of(of) if field.first and field.belongs(str(name))
            ]
            if more := args[len(first) :]:
                help = "write `key=value`"
                raise wrong("E0404", "arguments are given by name here", more[0].span, help=help)
            named = (
                tree.Setting(tree.Name(key, arg.span), arg, arg.span)
                for key, arg in zip(first, args, strict=False)
            )
            return tree.Section(setting.key, name, (*named, *entries), setting.span)
        case other:
            raise unfit(setting.key, other, "a name or a call")


# ---- showing


def show(instance: Settings) -> str:
    """The settings as plan text, which reads back to an equal instance; unset ones are left out."""
    return "\n".join(_lines(instance))


def _lines(instance: Settings) -> Iterator[str]:
    yield " ".join(filter(None, (instance.SECTION, _name(instance), "{")))
    for field in fields_of(type(instance)):
        if field.belongs(_name(instance)) and getattr(instance, field.name) is not None:
            yield from (f"  {line}" for line in _entry_lines(field, getattr(instance, field.name)))
    yield "}"


def _entry_lines(field: Field, value: Any) -> Iterator[str]:
    match field.what:
        case Value(show=show_value):
            yield f"{field.key} {'every' if field.every else '='} {show_value(value)}"
        case Part(form="call"):
            yield f"{field.key} = {_as_call(value)}"
        case Part(form="section"):
            yield from _lines(value)
        case Part():
            for part in value:
                yield from _lines(part)


def _as_call(instance: Settings) -> str:
    """Calls hold values only."""
    arguments = [
        ("" if field.first else f"{field.key}=") + field.what.show(getattr(instance, field.name))
        for field in fields_of(type(instance))
        if field.belongs(_name(instance))
        and isinstance(field.what, Value)
        and getattr(instance, field.name) is not None
    ]
    return f"{_name(instance)}({', '.join(arguments)})" if arguments else _name(instance)


def _name(instance: Settings) -> str:
    field, heading = heading_of(type(instance))
    return "" if heading is None else getattr(instance, field)


# ---- comparing


def differing(first: Settings, second: Settings) -> Iterator[tuple[str, str, str]]:
    """The settings in which two sections of a kind differ, and how each of the two writes it."""
    if _name(first) != _name(second):
        yield first.SECTION, _name(first), _name(second)
    for field in fields_of(type(first)):
        own, other = getattr(first, field.name), getattr(second, field.name)
        match field.what:
            case Part(form="section" | "call"):
                yield from differing(own, other)
            case Part():
                yield from _differing_parts(own, other)
            case what if own != other:
                yield field.key, _said(what, own), _said(what, other)
            case _:
                pass


def _differing_parts(
    first: Sequence[Settings], second: Sequence[Settings]
) -> Iterator[tuple[str, str, str]]:
    """The same of sections that there may be several of, by their names."""
    ours, theirs = (
        {f"{part.SECTION} {_name(part)}": part for part in parts} for parts in (first, second)
    )
    for key in dict.fromkeys((*ours, *theirs)):
        own, other = ours.get(key), theirs.get(key)
        if own and other:
            yield from ((f"{key} {name}", a, b) for name, a, b in differing(own, other))
        else:
            yield key, "set" if own else "unset", "set" if other else "unset"


def _said(what: Value, value: Any) -> str:
    return "unset" if value is None else what.show(value)


# ---- the JSON Schema of all settings: what `plan.json` has under `settings`

DIALECT = "https://json-schema.org/draft/2020-12/schema"

SECTIONS = (Cluster, Pipelining, Flow, Train, Watch)
"""The sections of a plan that are settings; `mesh`, `shard` and `names` have rules."""


def settings_schema() -> dict[str, Any]:
    """The schema: a property for each section of a plan, a definition for each class of
    settings.
    """
    return {
        "$schema": DIALECT,
        "title": "Settings of a scalec plan",
        "description": (
            "Sections by name, with each setting's meaning, range and default; sizes are in bytes."
        ),
        "type": "object",
        "properties": {
            section.SECTION: {"$ref": f"#/$defs/{section.__name__}"} for section in SECTIONS
        },
        "additionalProperties": False,
        "$defs": {cls.__name__: _object(cls) for cls in _classes(SECTIONS)},
    }


def _classes(classes: tuple[type[Settings], ...]) -> dict[type[Settings], None]:
    """Classes, each before those of its parts."""
    found = dict[type[Settings], None]()
    for cls in classes:
        parts = tuple(field.what.of for field in fields_of(cls) if isinstance(field.what, Part))
        found |= {cls: None} | _classes(parts)
    return found


def _object(cls: type[Settings]) -> dict[str, Any]:
    name, heading = heading_of(cls)
    named = (
        {} if heading is None else {name: {"enum": [*heading]} if heading else {"type": "string"}}
    )
    fields = fields_of(cls)
    properties = named | {field.name: _property(cls, field) for field in fields}
    required = (*named, *(field.name for field in fields if field.required))
    return {"description": (cls.__doc__ or "").partition("\n")[0]} | record(properties, *required)


def _property(cls: type[Settings], field: Field) -> dict[str, Any]:
    if isinstance(field.what, Part):
        part = {"$ref": f"#/$defs/{field.what.of.__name__}"}
        return {"type": "array", "items": part} if field.what.form == "sections" else part
    default = attrs.fields_dict(cls)[field.name].default
    value = (
        field.what.schema
        if default is not None
        else {"anyOf": [field.what.schema, {"type": "null"}]}
    )
    only = f"; of `{field.variant}` only" if field.variant else ""
    given = {} if field.required else {"default": _plain(default)}
    return {"description": f"{field.doc}{only}. In a plan: {field.what.takes}"} | value | given


def _plain(value: Any) -> Any:
    """A default as JSON has it."""
    if isinstance(value, Selection | Size):
        return attrs.asdict(value)
    return [*value] if isinstance(value, tuple) else value
