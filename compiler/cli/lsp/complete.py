"""The words that can be written at a place, from the words before it alone, since the text is
rarely a plan there.
"""

import re
from collections.abc import Iterator, Sequence
from inspect import cleandoc

from attrs import frozen

from ...config.fields import Field, Part, Settings, fields_of, heading_of
from ...config.gpus import GPUS
from ...config.settings import STDLIB
from ...frontend.calls import signature
from ...frontend.routes import CALL
from ...frontend.sharding import HOW, ZERO
from ...ir import STATES
from ...ops import OPS, OpDef
from .document import Document
from .hover import op_named, takes
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
    """An open bracket: the words before it, in the bracket around it, and those in it."""

    opens: str
    before: Sequence[str]
    words: list[str]


def complete(document: Document, line: int, column: int) -> list[Item]:
    """The words for a place; one that has begun there is left to the editor."""
    text = document.source.text[: offset(document.source.text, line, column)]
    begun = re.search(r"\w*$", text)
    frames = _frames(text[: begun.start()] if begun else text)
    if frames is None:
        return []
    here = _Here(document, frames, fresh=bool(re.search(r"(?:^|\n)[ \t]*\w*$", text)))
    return [*{item.label: item for item in here.items()}.values()]


def call_at(document: Document, line: int, column: int) -> tuple[OpDef, list[str], int] | None:
    """The op in whose call a place is, the words of its signature, and which of them is given
    there.
    """
    for frame in reversed(
        _frames(document.source.text[: offset(document.source.text, line, column)]) or ()
    ):
        if frame.opens == "(" and frame.before and (entry := op_named(frame.before[-1])):
            words = signature(entry).partition("(")[2][:-1].split(", ")
            keys, many = [word.partition("=")[0] for word in words], frame.words.count(",")
            key = frame.words[-2] if frame.words[-1:] == ["="] else ""
            return entry, words, keys.index(key) if key in keys else min(many, len(keys) - 1)
    return None


def _frames(text: str) -> list[_Frame] | None:
    """The brackets that are open at the end of a text, the outermost first; None within a
    string or comment.
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
        self._path, self._heading = [kind for kind, _ in heads], heads[-1][1] if heads else ""
        self._of: type[Settings] | None = None
        for kind in self._path:
            self._of = part_of(self._of, kind) or SECTIONS.get(kind)

    def items(self) -> Iterator[Item]:
        """All words that make sense."""
        frame, section = self._frames[-1], self._path[-1] if self._path else ""
        if frame.opens == "(":
            yield from self._in_call(frame.before[-1] if frame.before else "")
        elif frame.opens == "[":
            yield from self._in_list()
        elif not self._path:
            yield from self._sections(*ITEMS)
        elif section in ("shard", "state") and (section == "shard" or self._last != "="):
            yield from self._in_rules(section)
        elif self._of:
            yield from self._in_settings(self._of, self._heading)
        elif section == "mesh":
            yield from (
                Item(name, Kind.AXIS, f"usual for {what}")
                for name, what in AXES.items()
                if self._last != "="
            )
        elif section == "use":
            yield from self._sections("dims", "const", "mesh", "shard", "names")
        elif section in DECLARING:
            yield from self._named(
                *((Kind.DIM, Kind.CONST) if self._last == "=" else (DECLARING[section],))
            )
        elif self._last in ("repeat", "to"):
            yield from self._named(Kind.DIM)
        elif self._last == "~":
            yield from (Item(word, Kind.OP, doc=FUNCTIONS[word]) for word in INITIAL)
        elif self._last == "by":
            yield Item(CALL.plan_name, Kind.OP, signature(CALL), CALL.doc)
        else:
            yield from (
                Item(word, Kind.SECTION, doc=doc) for word, doc in STATEMENTS.items() if self._fresh
            )
            yield from self._in_expression()

    def _sections(self, *others: str) -> Iterator[Item]:
        """Sections of settings, and other words."""
        yield from (Item(word, Kind.SECTION, doc=MEANINGS[word]) for word in others)
        yield from (
            Item(name, Kind.SECTION, doc=cleandoc(of.__doc__ or ""))
            for name, of in SECTIONS.items()
        )

    def _named(self, *kinds: Kind) -> Iterator[Item]:
        """The names of the last text that was a plan."""
        program = self._document.facts.program if self._document.facts else self._document.model
        sizes = {dim.name: f"{dim.size:,}" for dim in program.dims} if program else {}
        sizes |= {axis.name: f"{axis.size:,}" for axis in program.axes} if program else {}
        for it in self._document.syntax.mentions if self._document.syntax else ():
            if it.kind in kinds:
                yield Item(it.name, it.kind, sizes.get(it.name, it.kind.said))

    def _in_expression(self) -> Iterator[Item]:
        yield from self._named(Kind.VALUE, Kind.PARAM, Kind.CONST, Kind.OP)
        for entry in OPS.values():
            if entry.user_visible:
                yield Item(entry.plan_name, Kind.OP, signature(entry), entry.doc)

    def _in_call(self, name: str) -> Iterator[Item]:
        before = self._frames[-1].before
        if self._of and len(before) > 2 and before[-2] == "=":
            yield from self._in_settings(part_of(self._of, before[-3]) or self._of, name)
            return
        entry = op_named(name)
        attributes = {it.name: it for it in entry.attributes if not it.implied} if entry else {}
        if self._last == "=" and (attribute := attributes.get(self._key)):
            yield from (Item(choice, Kind.WORD) for choice in attribute.choices)
            yield from self._named(Kind.DIM if attribute.dims else Kind.CONST)
            return
        yield from (
            Item(f"{it.name}=", Kind.ARGUMENT, ", ".join(it.choices) or it.dims)
            for it in attributes.values()
        )
        yield from self._in_expression()

    def _in_list(self) -> Iterator[Item]:
        """Dims of a parameter or of `split`; among settings files."""
        if self._of:
            yield Item(STDLIB, Kind.WORD, doc="the source of Python's standard library")
        else:
            yield from self._named(Kind.DIM)

    def _in_rules(self, section: str) -> Iterator[Item]:
        """Dims or state, `over`, axes, and how."""
        words = self._words
        start = max((at for at, word in enumerate(words) if word in ("over", *HOW)), default=-1)
        rest = words[start + 1 :]
        while start >= 0 and rest[1:2] == [","]:  # the first of several axes
            rest = rest[2:]
        if self._last in HOW:
            yield from (Item(word, Kind.WORD) for word in HOW[self._last])
        elif start >= 0 and words[start] == "over" and not rest:
            yield from self._named(Kind.AXIS)
        else:
            after_axes = start >= 0 and rest == [self._last]
            after_dims = self._last not in ("", ",", "}") and not after_axes
            yield from (Item(word, Kind.WORD) for word in ("over",) if after_dims)
            yield from (Item(word, Kind.WORD) for word in HOW if after_axes and section == "shard")
            yield from self._named(Kind.DIM) if section == "shard" else ()
            yield from (Item(word, Kind.WORD) for word in (*STATES, ZERO) if section == "state")
            yield from self._in_settings(self._of) if self._of else ()

    def _in_settings(self, of: type[Settings], heading: str = "") -> Iterator[Item]:
        if self._last == "=":
            yield from (
                each for field in fields_of(of) if field.key == self._key for each in _values(field)
            )
            return
        begun = next((field for field in fields_of(of) if field.key == self._last), None)
        if begun and isinstance(begun.what, Part) and begun.what.form != "call":
            yield from _values(begun)  # the name of a section
            return
        given = {
            word
            for word, after in zip(self._words, self._words[1:], strict=False)
            if after in ("=", "every")
        }
        for field in fields_of(of):
            if field.key not in given and (not heading or field.belongs(heading)):
                yield Item(field.key, Kind.SETTING, takes(field), field.doc or _doc(field))


def _doc(field: Field) -> str:
    return cleandoc(field.what.of.__doc__ or "") if isinstance(field.what, Part) else ""


def _values(field: Field) -> Iterator[Item]:
    """The words that a setting takes."""
    if isinstance(field.what, Part):
        yield from (
            Item(word, Kind.WORD, doc=_doc(field)) for word in heading_of(field.what.of)[1] or ()
        )
    elif field.key == "gpu":
        yield from (Item(word, Kind.WORD) for word in GPUS)
    elif field.what.takes.startswith("one of"):
        yield from (
            Item(word, Kind.WORD, doc=field.doc)
            for word in re.findall("`([^`]+)`", field.what.takes)
        )


def _head(frame: _Frame) -> tuple[str, str]:
    """The word that begins a section or item, of the words before its brace, and the name after
    it, "" for none.
    """
    before = frame.before
    if before and before[-1] == ")":
        return next((word for word in reversed(before) if word in ("model", "route")), ""), ""
    if before and before[-1].startswith('"'):
        return "use", ""
    names: list[str] = []
    for word in reversed(before):
        if not word.isidentifier():
            break
        names.append(word)
    known = {*SECTIONS, *DECLARING, "shard", "repeat", "optimizer", "data", "set", "group"}
    at = next((at for at, name in enumerate(names[:4]) if name in known), -1)
    return (names[at], names[at - 1] if at else "") if at >= 0 else ("", "")
