"""The names in a plan and the files that it uses: each mention of a name with its kind.

Purpose: definitions, references, renaming, colours and hovers, from syntax alone.  Non-goals:
whether names are right.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, cast

import attrs
from attrs import evolve, field, frozen

from ...compiler.config import schema
from ...compiler.config.fields import Part, Settings, fields_of, heading_of
from ...compiler.config.settings import Flow, StateGroup
from ...compiler.syntax import tree
from ...compiler.syntax.source import Span

SECTIONS: dict[str, type[Settings]] = {settings.SECTION: settings for settings in schema.SECTIONS}
"""The sections of a plan that are settings, by name."""


class Kind(Enum):
    """The kinds of things that have names: in words, and the protocol's kinds of tokens, and of
    items and symbols.
    """

    DIM = "dim", "typeParameter", "TypeParameter"
    AXIS = "axis", "enum", "Enum"
    CONST = "constant", "enumMember", "Constant"
    VALUE = "value", "variable", "Variable"
    PARAM = "parameter", "parameter", "Field"
    INDEX = "index", "variable", "Variable"
    OP = "op", "function", "Function"
    ARGUMENT = "argument", "property", "Property"
    SECTION = "section", "namespace", "Module"
    SETTING = "setting", "property", "Property"
    WORD = "word", "enumMember", "EnumMember"
    MODEL = "model", "class", "Class"
    FILE = "file", "string", "File"

    def __init__(self, said: str, token: str, item: str) -> None:
        self.words, self.token, self.item = said, token, item


RENAMABLE = (Kind.DIM, Kind.AXIS, Kind.CONST, Kind.VALUE, Kind.PARAM, Kind.INDEX)
"""The kinds of names that are the author's own."""

Owner = type[Settings] | str | None


@frozen
class Mention:
    """A name at a place.

    binds  whether the name gets its meaning there
    of     the class of settings or the op that a setting, a word or an argument belongs to
    """

    kind: Kind
    name: str
    span: Span
    binds: bool = False
    owner: Owner = field(default=None, repr=False)

    def is_at(self, path: str, line: int, column: int) -> bool:
        """Whether it is at a place, or ends there."""
        span = self.span
        return span.path == path and span.line == line and span.column <= column <= span.end_column


def mentions(plans: Sequence[tree.Plan]) -> tuple[Mention, ...]:
    """The names in files that make up one plan, file by file in their order."""
    names = list[Mention]()
    for plan in plans:
        for item in plan.items:
            names += _mentions_in(item, None)
    kinds: dict[str, Kind] = dict.fromkeys(("batch", "seq", "microbatches"), Kind.DIM)
    for mention in names:
        if mention.binds and mention.kind is not Kind.AXIS and mention.kind in RENAMABLE:
            kinds[mention.name] = mention.kind
    for index, mention in enumerate(names):
        if mention.kind is Kind.WORD:
            names[index] = evolve(mention, kind=_kind(mention, kinds))
    path = plans[0].span.path
    return tuple(sorted(names, key=lambda name: (name.span.path != path, name.span.start)))


def _kind(word: Mention, kinds: Mapping[str, Kind]) -> Kind:
    """The kind of thing that a word names.

    Among settings, words of the language come before names of the plan, except for dims.
    """
    kind = kinds.get(word.name, Kind.WORD)
    return kind if kind is Kind.DIM or not isinstance(word.owner, type) else Kind.WORD


ROLES: dict[tuple[type, str], tuple[Kind, bool]] = {
    (tree.Model, "name"): (Kind.MODEL, True),
    (tree.Input, "name"): (Kind.VALUE, True),
    (tree.Input, "dims"): (Kind.DIM, False),
    (tree.Init, "names"): (Kind.PARAM, False),
    (tree.Bind, "names"): (Kind.VALUE, True),
    (tree.Repeat, "dim"): (Kind.DIM, False),
    (tree.Repeat, "index"): (Kind.INDEX, True),
    (tree.If, "index"): (Kind.INDEX, False),
    (tree.Route, "value"): (Kind.VALUE, False),
    (tree.Route, "dim"): (Kind.DIM, False),
    (tree.UserOp, "name"): (Kind.OP, True),
    (tree.Call, "name"): (Kind.OP, False),
    (tree.ParamUse, "name"): (Kind.PARAM, True),
    (tree.ParamUse, "ins"): (Kind.DIM, False),
    (tree.ParamUse, "outs"): (Kind.DIM, False),
    (tree.Rule, "axes"): (Kind.AXIS, False),
    (tree.Section, "kind"): (Kind.SECTION, False),
}
"""The kind of each name in a node, and whether the node binds it; all others are words, or are
bound elsewhere.
"""

DECLARING = {"dims": Kind.DIM, "const": Kind.CONST, "mesh": Kind.AXIS, "names": Kind.PARAM}
"""The sections whose keys are the author's own names."""


def _mentions_in(node: Any, owner: Owner) -> Iterator[Mention]:
    """The names in a node of a section or call `owner`."""
    match node:
        case tree.Name(name=name):
            yield Mention(Kind.WORD, name, node.span, owner=owner)
        case tree.Use():
            yield from _use(node)
        case tree.UserOp(name=name):
            yield Mention(Kind.OP, name.name, name.span, binds=True)
        case tree.Section():
            yield from _in_section(node, owner)
        case tree.Setting():
            yield from _setting(node, owner)
        case tree.Call():
            yield from _call(node, owner)
        case tree.Rule():
            yield from _rule(node, owner)
        case _ if attrs.has(node.__class__):
            yield from _fields(node, owner)
        case _:
            pass


def _use(use: tree.Use) -> Iterator[Mention]:
    yield Mention(Kind.FILE, use.path.value, use.path.span)
    for section in use.sections:
        for mention in _mentions_in(section, None):
            # the file binds the names, and the section overrides their values
            yield evolve(mention, binds=mention.binds and mention.kind is Kind.AXIS)


def _call(call: tree.Call, owner: Owner) -> Iterator[Mention]:
    if isinstance(owner, type):
        yield Mention(Kind.WORD, call.name.name, call.name.span, owner=owner)
        yield from _fields(call, owner, leaving="name")
    else:
        yield from _fields(call, call.name.name)


def _rule(rule: tree.Rule, owner: Owner) -> Iterator[Mention]:
    for dim in rule.dims:
        if dim.span.words == dim.name:  # `zero 1` means dims that it does not name
            yield Mention(Kind.WORD, dim.name, dim.span)
    yield from _fields(rule, owner, leaving="dims")


def _in_section(section: tree.Section, owner: Owner) -> Iterator[Mention]:
    kind = section.kind
    declared = DECLARING.get(kind.name)
    if declared:
        yield Mention(Kind.SECTION, kind.name, kind.span)
        for entry in section.entries:
            yield from _mentions_in_declaration(entry, declared)
    elif isinstance(owner, type):
        yield from _section(section, part_of(owner, kind.name))
    else:
        yield from _section(section, SECTIONS.get(kind.name))


def _setting(setting: tree.Setting, owner: Owner) -> Iterator[Mention]:
    key = setting.key
    if isinstance(owner, type):
        yield Mention(Kind.SETTING, key.name, key.span, owner=owner)
        yield from _mentions_in(setting.value, part_of(owner, key.name) or owner)
    else:
        yield Mention(Kind.ARGUMENT, key.name, key.span, owner=owner)
        yield from _mentions_in(setting.value, owner)


def _fields(node: Any, owner: Owner, leaving: str = "") -> Iterator[Mention]:
    for attribute in attrs.fields(node.__class__):
        value = getattr(node, attribute.name)
        if attribute.name in ("span", leaving):
            continue
        role = ROLES.get((node.__class__, attribute.name))
        for part in cast(tuple[Any, ...], value if isinstance(value, tuple) else (value,)):
            if role and isinstance(part, tree.Name):
                kind, binds = role
                yield Mention(kind, part.name, part.span, binds)
            else:
                yield from _mentions_in(part, owner)


def _section(section: tree.Section, settings: type[Settings] | None) -> Iterator[Mention]:
    yield Mention(Kind.SECTION, section.kind.name, section.kind.span, owner=settings)
    if section.name:
        kind = Kind.WORD if settings and heading_of(settings)[1] else Kind.SECTION
        yield Mention(kind, section.name.name, section.name.span, owner=settings)
    for entry in section.entries:
        yield from _mentions_in(entry, settings)


def _mentions_in_declaration(entry: tree.Entry, kind: Kind) -> Iterator[Mention]:
    if not isinstance(entry, tree.Setting):
        return
    is_param = kind is Kind.PARAM
    yield Mention(kind, entry.key.name, entry.key.span, binds=not is_param)
    if is_param:
        yield from _in_strings(entry.value)
    else:
        yield from _mentions_in(entry.value, None)


def _in_strings(value: Any) -> Iterator[Mention]:
    """The dims in and beside names of tensors, as `"layers.{i}.experts.{experts}.weight"`."""
    match value:
        case tree.String(span=span):
            for match in re.finditer(r"\{(\w+)\}", span.words):
                start, end = span.column + match.start(1), span.column + match.end(1)
                place = Span(span.path, span.line, start, span.line, end, span.text)
                yield Mention(Kind.WORD, match[1], place, owner=Settings)
        case tree.Call(args=args, kwargs=kwargs):
            for argument in (*args, *(setting.value for setting in kwargs)):
                yield from _in_strings(argument)
        case _:
            yield from _mentions_in(value, None)


def part_of(settings: type[Settings] | None, key: str) -> type[Settings] | None:
    """The class of the section `key` within a section of the class `settings`.

    None where that is a value, or unknown.
    """
    if settings is Flow and key == StateGroup.SECTION:
        return StateGroup
    for setting in fields_of(settings) if settings else ():
        if setting.key == key and isinstance(setting.what, Part):
            return setting.what.section_class
    return None
