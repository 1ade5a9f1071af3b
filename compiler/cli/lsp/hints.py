"""Collectives beside the lines that cause them, and names coloured by what they name."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import PurePath

from ...analysis.collective import Collective
from ...config.units import amount
from .document import Document
from .mentions import Kind, Mention
from .moved import Moved

LEAST = 1024
"""The least bytes of a collective that is shown."""

BACKWARD = {"backward": "bwd ", "step": "step "}


def hints(document: Document, first: int, last: int) -> Iterator[tuple[int, str]]:
    """For each of these lines that communicates, its number and its collectives in short."""
    facts = document.facts
    if not facts:
        return
    path, name = document.source.path, PurePath(document.source.path).name
    moved = Moved(facts.source, document.source) if path == facts.source.path else None
    own = (each for each in facts.sent if each.bytes >= LEAST and each.line.rpartition(":")[0] == name)
    for number, found in groupby(sorted(own, key=_line), key=_line):
        place = moved.now(number) if moved else number
        if place and first <= place <= last:
            yield place, " · ".join(dict.fromkeys(map(_short, found)))


def _line(it: Collective) -> int:
    return int(it.line.rpartition(":")[2])


def _short(it: Collective) -> str:
    """For instance `bwd reduce_scatter tp 256.0 MiB × 126`."""
    times = f" × {it.count:,}" if it.count > 1 else ""
    return f"{BACKWARD.get(it.where, '')}{it.op} {'×'.join(it.axes)} {amount(it.bytes)}{times}"


TYPES = {
    Kind.DIM: "typeParameter",
    Kind.AXIS: "enum",
    Kind.CONST: "enumMember",
    Kind.VALUE: "variable",
    Kind.PARAM: "parameter",
    Kind.INDEX: "variable",
    Kind.OP: "function",
    Kind.ARGUMENT: "property",
    Kind.SECTION: "namespace",
    Kind.SETTING: "property",
    Kind.WORD: "enumMember",
    Kind.MODEL: "class",
    Kind.FILE: "string",
}
"""The protocol's types of tokens."""


def colours(document: Document) -> Iterator[Mention]:
    """The names of the text as it is now, each with its place there, in order."""
    path, end = document.source.path, (0, 0)
    for it in document.syntax.mentions if document.syntax else ():
        span = document.here(it.span) if it.span.path == path else None
        if span and (span.line, span.column) >= end:
            end = (span.end_line, span.end_column)
            yield Mention(it.kind, it.name, span, it.binds)
