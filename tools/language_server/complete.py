"""The words that can be written at a place, from the words before it alone, since the text is
rarely a plan there.
"""

import re
from collections.abc import Iterator, Sequence
from inspect import cleandoc

from attrs import frozen

from ...compiler.config.fields import Field, Part, Settings, fields_of, heading_of
from ...compiler.config.gpus import GPUS
from ...compiler.config.settings import STDLIB
from ...compiler.frontend.arguments import signature
from ...compiler.frontend.route_call import CALL
from ...compiler.frontend.sharding import HOW, ZERO
from ...compiler.ir import STATES
from ...compiler.ops import OPS, Attribute, OpDef
from .document import Document
from .hover import find_op, takes
from .mentions import DECLARING, SECTIONS, Kind, part_of
from .moved import offset
from .words import AXES, FUNCTIONS, INITIAL, ITEMS, MEANINGS, STATEMENTS, WORDS

_PAIRS = {"(": ")", "[": "]", "{": "}"}


@frozen
class Item:
    """A word that can be written, in short and in full."""

    label: str
    kind: Kind
    detail: str = ""
    doc: str = ""


@frozen
class _Frame:
    """An open bracket: the words before it, in the bracket around it, and the words in it."""

    opens: str
    before: Sequence[str]
    words: list[str]


def complete(document: Document, line: int, column: int) -> list[Item]:
    """The words for a place; the editor filters them by the word that begins there."""
    text = document.source.text[: offset(document.source.text, line, column)]
    prefix = re.search(r"\w*$", text)
    frames = _frames(text[: prefix.start()] if prefix else text)
    if frames is None:
        return []
    is_fresh = bool(re.search(r"(?:^|\n)[ \t]*\w*$", text))
    items = _Here(document, frames, fresh=is_fresh).items()
    return [*{item.label: item for item in items}.values()]


def call_at(document: Document, line: int, column: int) -> tuple[OpDef, list[str], int] | None:
    """The op of the call around a place, the words of its signature, and the index of the argument
    at the place.
    """
    text = document.source.text
    for frame in reversed(_frames(text[: offset(text, line, column)]) or ()):
        if frame.opens != "(" or not frame.before:
            continue
        entry = find_op(frame.before[-1])
        if entry:
            words = signature(entry).partition("(")[2][:-1].split(", ")
            return entry, words, _argument(frame.words, words)
    return None


def _argument(written: Sequence[str], signature: Sequence[str]) -> int:
    """The index in a signature of the argument that comes after the written words of a call."""
    keys = [word.partition("=")[0] for word in signature]
    key = written[-2] if written[-1:] == ["="] else ""
    if key in keys:
        return keys.index(key)
    return min(written.count(","), len(keys) - 1)


def _frames(text: str) -> list[_Frame] | None:
    """The brackets that are open at the end of a text, the outermost first.

    None where the text ends within a string or comment.
    """
    frames, last = [_Frame("", (), [])], ""
    for match in WORDS.finditer(text):
        last = word = match[0]
        if word in _PAIRS:
            frames.append(_Frame(word, frames[-1].words, []))
        elif word in _PAIRS.values() and len(frames) > 1:
            frames.pop()
        if word[0] != "#" and word not in _PAIRS:
            frames[-1].words.append(word)
    is_open = re.search(r'(?:#[^\n]*|^"(?:[^"\\\n]|\\.)*)$', last)
    return None if is_open and text.endswith(last) else frames


class _Here:
    """A place, by the brackets around it; `fresh` where nothing is before it on its line."""

    def __init__(self, document: Document, frames: Sequence[_Frame], *, fresh: bool) -> None:
        self._document, self._frames, self._fresh = document, frames, fresh
        self._words = frames[-1].words
        *_, self._key, self._last = ("", "", *self._words)
        heads = [_head(frame) for frame in frames[1:] if frame.opens == "{"]
        self._path = [kind for kind, _ in heads]
        self._heading = heads[-1][1] if heads else ""
        self._settings: type[Settings] | None = None
        for kind in self._path:
            self._settings = part_of(self._settings, kind) or SECTIONS.get(kind)

    def items(self) -> Iterator[Item]:
        """All words that make sense."""
        frame = self._frames[-1]
        section = self._path[-1] if self._path else ""
        if frame.opens == "(":
            yield from self._in_call(frame.before[-1] if frame.before else "")
        elif frame.opens == "[":
            yield from self._in_list()
        elif not self._path:
            yield from self._sections(*ITEMS)
        elif section == "shard" or (section == "state" and self._last != "="):
            yield from self._in_rules(section)
        elif self._settings:
            yield from self._in_settings(self._settings, self._heading)
        elif section == "use" or section in DECLARING:
            yield from self._in_declarations(section)
        else:
            yield from self._in_model()

    def _in_declarations(self, section: str) -> Iterator[Item]:
        """The author's own names, and sections that set them for a file that is used."""
        if section == "mesh":
            if self._last != "=":
                for name, what in AXES.items():
                    yield Item(name, Kind.AXIS, f"usual for {what}")
        elif section == "use":
            yield from self._sections("dims", "const", "mesh", "shard", "names")
        elif self._last == "=":
            yield from self._names_of_kinds(Kind.DIM, Kind.CONST)
        else:
            yield from self._names_of_kinds(DECLARING[section])

    def _in_model(self) -> Iterator[Item]:
        """Statements, and what follows their first words."""
        if self._last in ("repeat", "to"):
            yield from self._names_of_kinds(Kind.DIM)
        elif self._last == "~":
            for word in INITIAL:
                yield Item(word, Kind.OP, doc=FUNCTIONS[word])
        elif self._last == "by":
            yield Item(CALL.plan_name, Kind.OP, signature(CALL), CALL.doc)
        else:
            if self._fresh:
                for word, doc in STATEMENTS.items():
                    yield Item(word, Kind.SECTION, doc=doc)
            yield from self._in_expression()

    def _sections(self, *others: str) -> Iterator[Item]:
        """Sections of settings, and other words."""
        for word in others:
            yield Item(word, Kind.SECTION, doc=MEANINGS[word])
        for name, settings in SECTIONS.items():
            yield Item(name, Kind.SECTION, doc=cleandoc(settings.__doc__ or ""))

    def _names_of_kinds(self, *kinds: Kind) -> Iterator[Item]:
        """The names of the last text that was a plan."""
        program = self._document.facts.program if self._document.facts else self._document.model
        sizes = dict[str, str]()
        if program:
            sizes |= {dim.name: f"{dim.size:,}" for dim in program.dims}
            sizes |= {axis.name: f"{axis.size:,}" for axis in program.axes}
        for mention in self._document.mentions:
            if mention.kind in kinds:
                detail = sizes.get(mention.name, mention.kind.words)
                yield Item(mention.name, mention.kind, detail)

    def _in_expression(self) -> Iterator[Item]:
        yield from self._names_of_kinds(Kind.VALUE, Kind.PARAM, Kind.CONST, Kind.OP)
        for entry in OPS.values():
            if entry.user_visible:
                yield Item(entry.plan_name, Kind.OP, signature(entry), entry.doc)

    def _in_call(self, name: str) -> Iterator[Item]:
        before = self._frames[-1].before
        if self._settings and len(before) > 2 and before[-2] == "=":
            settings = part_of(self._settings, before[-3]) or self._settings
            yield from self._in_settings(settings, name)
            return
        attributes = dict[str, Attribute]()
        entry = find_op(name)
        for attribute in entry.attributes if entry else ():
            if not attribute.implied:
                attributes[attribute.name] = attribute
        if self._last == "=" and (attribute := attributes.get(self._key)):
            for choice in attribute.choices:
                yield Item(choice, Kind.WORD)
            yield from self._names_of_kinds(Kind.DIM if attribute.dims else Kind.CONST)
            return
        for attribute in attributes.values():
            detail = ", ".join(attribute.choices) or attribute.dims
            yield Item(f"{attribute.name}=", Kind.ARGUMENT, detail)
        yield from self._in_expression()

    def _in_list(self) -> Iterator[Item]:
        """Dims of a parameter or of `split`; among settings files."""
        if self._settings:
            yield Item(STDLIB, Kind.WORD, doc="the source of Python's standard library")
        else:
            yield from self._names_of_kinds(Kind.DIM)

    def _in_rules(self, section: str) -> Iterator[Item]:
        """Dims or state, `over`, axes, and how."""
        words, start = self._words, -1
        for index, word in enumerate(words):
            if word == "over" or word in HOW:
                start = index
        following = words[start + 1 :]
        while start >= 0 and following[1:2] == [","]:  # the first of several axes
            following = following[2:]
        if self._last in HOW:
            for word in HOW[self._last]:
                yield Item(word, Kind.WORD)
        elif start >= 0 and words[start] == "over" and not following:
            yield from self._names_of_kinds(Kind.AXIS)
        else:
            is_after_axes = start >= 0 and following == [self._last]
            yield from self._in_rule(section, is_after_axes)

    def _in_rule(self, section: str, is_after_axes: bool) -> Iterator[Item]:
        """The next word of a rule, or the first of the next one."""
        if not is_after_axes and self._last not in ("", ",", "}"):
            yield Item("over", Kind.WORD)
        if section == "shard":
            if is_after_axes:
                for word in HOW:
                    yield Item(word, Kind.WORD)
            yield from self._names_of_kinds(Kind.DIM)
        else:
            for word in (*STATES, ZERO):
                yield Item(word, Kind.WORD)
        if self._settings:
            yield from self._in_settings(self._settings)

    def _in_settings(self, settings: type[Settings], heading: str = "") -> Iterator[Item]:
        fields = fields_of(settings)
        if self._last == "=":
            for field in fields:
                if field.key == self._key:
                    yield from _values(field)
            return
        last_field = next((field for field in fields if field.key == self._last), None)
        if last_field and isinstance(last_field.what, Part) and last_field.what.form != "call":
            yield from _values(last_field)  # the name of a section
            return
        keys = set[str]()
        for word, following in zip(self._words, self._words[1:], strict=False):
            if following in ("=", "every"):
                keys.add(word)
        for field in fields:
            if field.key not in keys and (not heading or field.belongs(heading)):
                yield Item(field.key, Kind.SETTING, takes(field), field.doc or _doc(field))


def _doc(field: Field) -> str:
    return cleandoc(field.what.section_class.__doc__ or "") if isinstance(field.what, Part) else ""


def _values(field: Field) -> Iterator[Item]:
    """The words that a setting takes."""
    if isinstance(field.what, Part):
        for word in heading_of(field.what.section_class)[1] or ():
            yield Item(word, Kind.WORD, doc=_doc(field))
    elif field.key == "gpu":
        for word in GPUS:
            yield Item(word, Kind.WORD)
    elif field.what.takes.startswith("one of"):
        for word in re.findall("`([^`]+)`", field.what.takes):
            yield Item(word, Kind.WORD, doc=field.doc)


def _head(frame: _Frame) -> tuple[str, str]:
    """By the words before a brace: the word that begins a section or item, and the name after it,
    "" for none.
    """
    before = frame.before
    if before and before[-1] == ")":
        return next((word for word in reversed(before) if word in ("model", "route")), ""), ""
    if before and before[-1].startswith('"'):
        return "use", ""
    names: list[str] = []  # the last one first
    for word in reversed(before):
        if not word.isidentifier():
            break
        names.append(word)
    openers = {*SECTIONS, *DECLARING, "shard", "repeat", "optimizer", "data", "set", "group"}
    for index, name in enumerate(names[:4]):
        if name in openers:
            return name, names[index - 1] if index else ""
    return "", ""
