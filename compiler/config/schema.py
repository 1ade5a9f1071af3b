"""One reader and one printer for all sections of settings, and their JSON Schema.

`fields` has the fields of a class, `values` reads a value.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import attrs

from ..syntax import tree
from ..syntax.diagnostics import Diagnostics, Note, PlanError, did_you_mean, listing, nearest, wrong
from ..syntax.source import Span
from ..syntax.synonyms import find_setting, help_for_heading, help_for_setting
from .fields import Field, Part, Settings, fields_of, heading_of
from .settings import Cluster, Flow, Pipelining, Train, Watch
from .values import Selection, Size, Value, record, unfit

S = TypeVar("S", bound=Settings)

# ---- reading


def parse_section(
    cls: type[S], section: tree.Section, diagnostics: Diagnostics, *checks: Callable[[S], object]
) -> S | None:
    """The settings in `section`; None if there are mistakes in it or a check finds any, which
    are added to `diagnostics`.
    """
    mistakes = Diagnostics()
    with diagnostics.catch():
        instance = _Reader(cls, section, mistakes).get_instance()
        for check in checks:
            with mistakes.catch():
                check(instance)
        mistakes.check()
        return instance
    return None


class _Reader:
    """Reads one section."""

    def __init__(
        self, cls: type[Settings], section: tree.Section, diagnostics: Diagnostics
    ) -> None:
        self._cls = cls
        self._section = section
        self._diagnostics = diagnostics
        self._title = f"{section.kind} {section.name}" if section.name else section.kind.name
        self._values: dict[str, Any] = {}
        self._spans: dict[str, Span] = {}
        self._first: dict[str, Span] = {}
        self._meant: set[str] = set()

    def get_instance(self) -> Any:
        """The instance, worthless if there were mistakes."""
        self._heading()
        for entry in self._section.entries:
            with self._diagnostics.catch():
                self._entry(entry)
        for field in fields_of(self._cls):
            if field.required and field.key not in {*self._first, *self._meant}:
                self._missing(field)
        self._diagnostics.check()
        spans = {field.name: self._section.head for field in fields_of(self._cls)}
        return self._cls(**self._values, spans=spans | self._spans)

    def _missing(self, field: Field) -> None:
        help = f"it is: {field.doc}"
        if isinstance(field.what, Part):
            help = f"write `{field.what.example}`"
        message = f"`{self._title}` needs `{field.key}`"
        self._diagnostics.error("E0402", message, self._section.head, help=help)

    def _heading(self) -> None:
        """Reads the name of the section."""
        field, heading = heading_of(self._cls)
        kind, name = self._section.kind, self._section.name
        if heading is None:
            if name:
                self._diagnostics.error("E0406", f"`{kind}` takes no name", name.span)
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
        key = field.key
        if many and isinstance(entry, tree.Section):
            key = f"{field.key} {entry.name}"
        first = self._first.setdefault(key, entry.span)
        if first is not entry.span:
            notes = (Note(first, "first here"),)
            raise wrong("E0403", f"`{key}` is given twice", entry.span, notes=notes)
        value = self._value(field, entry)
        if many:
            value = (*self._values.get(field.name, ()), value)
        self._values[field.name] = value
        self._spans.setdefault(field.name, entry.span)

    def _field(self, entry: tree.Entry) -> Field:
        """The field that an entry sets."""
        match entry:
            case tree.Section(kind=key) | tree.Setting(key=key):
                pass
            case _:
                message = f"`{self._title}` has settings, not rules"
                raise _wrong_form(message, entry, "a setting is `key = value`")
        fields = fields_of(self._cls)
        field = next((field for field in fields if field.key == key.name), None)
        heading = str(self._section.name or "")
        if not field:
            raise self._unknown(key, [field.key for field in fields if field.belongs(heading)])
        if not field.belongs(heading):
            sections = " and ".join(f"`{self._section.kind} {name}`" for name in field.variants)
            message = f"`{key}` is a setting of {sections}, not of `{self._title}`"
            raise wrong("E0401", message, key.span)
        return field

    def _unknown(self, key: tree.Name, keys: Sequence[str]) -> PlanError:
        """The error for an unknown setting.

        The setting that it probably means counts as set, so that it is not reported as missing.
        """
        word, near = find_setting(key.name), nearest(key.name, keys)
        if word in keys:
            near, help = word, f"it is called {self._get_description(word)}"
        elif elsewhere := help_for_setting(key.name):
            help = elsewhere
        elif example := _example(self._cls, word):
            help = f"write `{example}`"
        elif near:
            help = f"did you mean `{near}`?"
        else:
            help = f"there are {listing(keys)}"
        self._meant.add(near)
        return wrong("E0401", f"`{self._title}` has no setting `{key}`", key.span, help=help)

    def _get_description(self, key: str) -> str:
        field = next(field for field in fields_of(self._cls) if field.key == key)
        if isinstance(field.what, Part):
            return f"`{key}`, as in `{field.what.example}`"
        return f"`{key}`: {field.doc}"

    def _value(self, field: Field, entry: tree.Entry) -> Any:
        """The value that an entry gives a field."""
        match field.what, entry:
            case Value(), tree.Setting(every=True) if not field.every:
                message = f"`{field.key}` is not done every few steps"
                raise _wrong_form(message, entry, f"write `{field.key} = …`")
            case Value() as value, tree.Setting():
                return value.get_value(entry.key, entry.value)
            case Part(section_class=section_class, form="call"), tree.Setting():
                return parse_section(
                    section_class, _as_section(entry, section_class), self._diagnostics
                )
            case Part(section_class=section_class, form="section" | "sections"), tree.Section():
                return parse_section(section_class, entry, self._diagnostics)
            case Part(form="section" | "sections") as part, _:
                raise _wrong_form(f"`{field.key}` is a section", entry, f"write `{part.example}`")
            case _:
                raise _wrong_form(f"`{field.key}` is a setting", entry, f"write `{field.key} = …`")


def _example(cls: type[Settings], key: str) -> str:
    """How `key` is written in a section inside sections of `cls` that has it; "" if none has."""
    parts = [field.what for field in fields_of(cls) if isinstance(field.what, Part)]
    for part in parts:
        for field in fields_of(part.section_class):
            if field.key == key:
                return part.example_of(field)
    for part in parts:
        if example := _example(part.section_class, key):
            return example
    return ""


def _wrong_form(message: str, entry: tree.Entry, help: str) -> PlanError:
    span = entry.head if isinstance(entry, tree.Section) else entry.span
    return wrong("E0406", message, span, help=help)


def _as_section(setting: tree.Setting, cls: type[Settings]) -> tree.Section:
    """`schedule = cosine(warmup=20)` as if it were `schedule cosine { warmup = 20 }`."""
    match setting.value:
        case tree.Name() as name:
            return tree.Section(setting.key, name, (), setting.span)
        case tree.Call(name=name, args=args, kwargs=entries):
            keys: list[str] = []
            for field in fields_of(cls):
                if field.first and field.belongs(str(name)):
                    keys.append(field.key)
            if more := args[len(keys) :]:
                help = "write `key=value`"
                raise wrong("E0404", "arguments are given by name here", more[0].span, help=help)
            settings: list[tree.Entry] = []
            for key, arg in zip(keys, args, strict=False):
                settings.append(tree.Setting(tree.Name(key, arg.span), arg, arg.span))
            return tree.Section(setting.key, name, (*settings, *entries), setting.span)
        case other:
            raise unfit(setting.key, other, "a name or a call")


# ---- showing


def print_section(instance: Settings) -> str:
    """The settings as plan text, which reads back to an equal instance; unset settings are left
    out.
    """
    return "\n".join(_lines(instance))


def _lines(instance: Settings) -> Iterator[str]:
    yield " ".join(filter(None, (instance.SECTION, _name(instance), "{")))
    for field, value in _set_fields(instance):
        for line in _entry_lines(field, value):
            yield f"  {line}"
    yield "}"


def _set_fields(instance: Settings) -> Iterator[tuple[Field, Any]]:
    """The fields that sections of this heading have and that are set, each with its value."""
    for field in fields_of(type(instance)):
        value = getattr(instance, field.name)
        if field.belongs(_name(instance)) and value is not None:
            yield field, value


def _entry_lines(field: Field, value: Any) -> Iterator[str]:
    match field.what:
        case Value(show=show_value):
            sign = "every" if field.every else "="
            yield f"{field.key} {sign} {show_value(value)}"
        case Part(form="call"):
            yield f"{field.key} = {_as_call(value)}"
        case Part(form="section"):
            yield from _lines(value)
        case Part():
            for part in value:
                yield from _lines(part)


def _as_call(instance: Settings) -> str:
    """A section as a call, which holds values only."""
    arguments: list[str] = []
    for field, value in _set_fields(instance):
        if isinstance(field.what, Value):
            argument = field.what.show(value)
            arguments.append(argument if field.first else f"{field.key}={argument}")
    if not arguments:
        return _name(instance)
    return f"{_name(instance)}({', '.join(arguments)})"


def _name(instance: Settings) -> str:
    field, heading = heading_of(type(instance))
    return "" if heading is None else getattr(instance, field)


# ---- comparing


def find_differences(first: Settings, second: Settings) -> Iterator[tuple[str, str, str]]:
    """The settings that two sections of a kind have with different values, and how each of the
    two writes it.
    """
    if _name(first) != _name(second):
        yield first.SECTION, _name(first), _name(second)
    for field in fields_of(type(first)):
        value, other = getattr(first, field.name), getattr(second, field.name)
        match field.what:
            case Part(form="section" | "call"):
                yield from find_differences(value, other)
            case Part():
                yield from _find_differences_of_parts(value, other)
            case what if value != other:
                yield field.key, _value_text(what, value), _value_text(what, other)
            case _:
                pass


def _find_differences_of_parts(
    first: Sequence[Settings], second: Sequence[Settings]
) -> Iterator[tuple[str, str, str]]:
    """The settings that differ in sections that may be there several times, by their names."""
    first_parts, second_parts = _parts_by_name(first), _parts_by_name(second)
    for key in dict.fromkeys((*first_parts, *second_parts)):
        part, other = first_parts.get(key), second_parts.get(key)
        if part and other:
            for name, words, other_words in find_differences(part, other):
                yield f"{key} {name}", words, other_words
        else:
            yield key, "set" if part else "unset", "set" if other else "unset"


def _parts_by_name(parts: Sequence[Settings]) -> dict[str, Settings]:
    return {f"{part.SECTION} {_name(part)}": part for part in parts}


def _value_text(what: Value, value: Any) -> str:
    return "unset" if value is None else what.show(value)


# ---- the JSON Schema of all settings: what `plan.json` has under `settings`

DIALECT = "https://json-schema.org/draft/2020-12/schema"

SECTIONS = (Cluster, Pipelining, Flow, Train, Watch)
"""The sections of a plan that hold settings; `mesh`, `shard` and `names` have rules."""


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
    """The classes and the classes of their parts; each class is before the classes of its parts."""
    all_classes = dict[type[Settings], None]()
    for cls in classes:
        parts = tuple(
            field.what.section_class for field in fields_of(cls) if isinstance(field.what, Part)
        )
        all_classes |= {cls: None} | _classes(parts)
    return all_classes


def _object(cls: type[Settings]) -> dict[str, Any]:
    """The schema of a class; the first line of its docstring is the description."""
    properties: dict[str, Any] = {}
    required: list[str] = []
    name, heading = heading_of(cls)
    if heading is not None:
        properties[name] = {"enum": [*heading]} if heading else {"type": "string"}
        required.append(name)
    for field in fields_of(cls):
        properties[field.name] = _property(cls, field)
        if field.required:
            required.append(field.name)
    return {"description": (cls.__doc__ or "").partition("\n")[0]} | record(properties, *required)


def _property(cls: type[Settings], field: Field) -> dict[str, Any]:
    """The schema of a field."""
    if isinstance(field.what, Part):
        part = {"$ref": f"#/$defs/{field.what.section_class.__name__}"}
        if field.what.form == "sections":
            return {"type": "array", "items": part}
        return part
    only = ""
    if field.variants:
        only = f"; of {' and '.join(f'`{name}`' for name in field.variants)} only"
    schema: dict[str, Any] = {
        "description": f"{field.doc}{only}. In a plan: {field.what.takes}",
    }
    default = attrs.fields_dict(cls)[field.name].default
    if default is None:
        schema["anyOf"] = [field.what.schema, {"type": "null"}]
    else:
        schema |= field.what.schema
    if not field.required:
        schema["default"] = _plain(default)
    return schema


def _plain(value: Any) -> Any:
    """A default as JSON has it."""
    if isinstance(value, Selection | Size):
        return attrs.asdict(value)
    return [*value] if isinstance(value, tuple) else value
