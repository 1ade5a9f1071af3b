"""The names in a plan and the files that it uses: each mention with what it names.

Purpose: definitions, references, renaming, colours and hovers, from syntax alone.  Non-goals:
whether names are right.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, cast

import attrs
from attrs import evolve, field, frozen

from ...config import schema
from ...config.fields import Part, Settings, fields_of, heading_of
from ...config.settings import Flow, StateGroup
from ...syntax import tree
from ...syntax.source import Span

SECTIONS: dict[str, type[Settings]] = {of.SECTION: of for of in schema.SECTIONS}
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
        self.said, self.token, self.item = said, token, item


RENAMED = (Kind.DIM, Kind.AXIS, Kind.CONST, Kind.VALUE, Kind.PARAM, Kind.INDEX)
"""The kinds of names that are the author's own."""

Of = type[Settings] | str | None


@frozen
class Mention:
    """A name at a place; `binds` where it is given its meaning there.

    of  the class of settings or the op that a setting, a word or an argument belongs to
    """

    kind: Kind
    name: str
    span: Span
    binds: bool = False
    of: Of = field(default=None, repr=False)

    def is_at(self, path: str, line: int, column: int) -> bool:
        """Whether it is at a place, or ends there."""
        span = self.span
        return span.path == path and span.line == line and span.column <= column <= span.end_column


def mentions(plans: Sequence[tree.Plan]) -> tuple[Mention, ...]:
    """The names in files that make up one plan, file by file in their order."""
    found = [each for plan in plans for item in plan.items for each in _of(item, None)]
    known = dict.fromkeys(("batch", "seq", "microbatches"), Kind.DIM)
    known |= {
        it.name: it.kind
        for it in found
        if it.binds and it.kind is not Kind.AXIS and it.kind in RENAMED
    }
    found = [evolve(it, kind=_kind(it, known)) if it.kind is Kind.WORD else it for it in found]
    return tuple(sorted(found, key=lambda it: (it.span.path != plans[0].span.path, it.span.start)))


def _kind(word: Mention, known: Mapping[str, Kind]) -> Kind:
    """The kind of thing that a word names; among settings the words of the language come first,
    but for dims.
    """
    kind = known.get(word.name, Kind.WORD)
    return kind if kind is Kind.DIM or not isinstance(word.of, type) else Kind.WORD


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


def _of(node: Any, of: Of) -> Iterator[Mention]:
    """The names in a node of a section or call `of`."""
    match node:
        case tree.Name(name=name):
            yield Mention(Kind.WORD, name, node.span, of=of)
        case tree.Use(path=path, sections=sections):
            yield Mention(Kind.FILE, path.value, path.span)
            for each in sections:  # which override what is bound in the file
                yield from (
                    evolve(it, binds=it.binds and it.kind is Kind.AXIS) for it in _of(each, None)
                )
        case tree.UserOp(name=name):
            yield Mention(Kind.OP, name.name, name.span, binds=True)
        case tree.Section(kind=kind) if own := DECLARING.get(kind.name):
            yield Mention(Kind.SECTION, kind.name, kind.span)
            for entry in node.entries:
                yield from _declared(entry, own)
        case tree.Section(kind=kind):
            yield from _section(
                node, part_of(of, kind.name) if isinstance(of, type) else SECTIONS.get(kind.name)
            )
        case tree.Setting(key=key, value=value):
            inner = part_of(of, key.name) if isinstance(of, type) else None
            yield Mention(
                Kind.SETTING if isinstance(of, type) else Kind.ARGUMENT, key.name, key.span, of=of
            )
            yield from _of(value, inner or of)
        case tree.Call(name=name) if isinstance(of, type):
            yield Mention(Kind.WORD, name.name, name.span, of=of)
            yield from _fields(node, of, leaving="name")
        case tree.Call(name=name):
            yield from _fields(node, name.name)
        case tree.Rule(dims=dims):
            yield from (
                Mention(Kind.WORD, dim.name, dim.span) for dim in dims if dim.span.words == dim.name
            )
            # `zero 1` means dims that it does not name
            yield from _fields(node, of, leaving="dims")
        case _ if attrs.has(node.__class__):
            yield from _fields(node, of)
        case _:
            pass


def _fields(node: Any, of: Of, leaving: str = "") -> Iterator[Mention]:
    for each in attrs.fields(node.__class__):
        value = getattr(node, each.name)
        if each.name in ("span", leaving):
            continue
        for part in cast(tuple[Any, ...], value if isinstance(value, tuple) else (value,)):
            role = ROLES.get((node.__class__, each.name))
            if role and isinstance(part, tree.Name):
                yield Mention(role[0], part.name, part.span, role[1])
            else:
                yield from _of(part, of)


def _section(section: tree.Section, of: type[Settings] | None) -> Iterator[Mention]:
    yield Mention(Kind.SECTION, section.kind.name, section.kind.span, of=of)
    if section.name:
        kind = Kind.WORD if of and heading_of(of)[1] else Kind.SECTION
        yield Mention(kind, section.name.name, section.name.span, of=of)
    for entry in section.entries:
        yield from _of(entry, of)


def _declared(entry: tree.Entry, kind: Kind) -> Iterator[Mention]:
    if not isinstance(entry, tree.Setting):
        return
    yield Mention(kind, entry.key.name, entry.key.span, binds=kind is not Kind.PARAM)
    yield from _in_strings(entry.value) if kind is Kind.PARAM else _of(entry.value, None)


def _in_strings(value: Any) -> Iterator[Mention]:
    """The dims of the names of tensors, `"layers.{i}.experts.{experts}.weight"`, and beside
    these.
    """
    match value:
        case tree.String(span=span):
            for found in re.finditer(r"\{(\w+)\}", span.words):
                start, end = (span.column + at for at in found.span(1))
                place = Span(span.path, span.line, start, span.line, end, span.text)
                yield Mention(Kind.WORD, found[1], place, of=Settings)
        case tree.Call(args=args, kwargs=kwargs):
            for each in (*args, *(setting.value for setting in kwargs)):
                yield from _in_strings(each)
        case _:
            yield from _of(value, None)


def part_of(of: type[Settings] | None, key: str) -> type[Settings] | None:
    """The class of the section `key` within one of this class; None where that is a value, or
    unknown.
    """
    if of is Flow and key == StateGroup.SECTION:
        return StateGroup
    parts = (field.what for field in fields_of(of) if field.key == key) if of else ()
    return next((part.of for part in parts if isinstance(part, Part)), None)
