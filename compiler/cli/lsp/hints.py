"""Collectives beside the lines that cause them, and names coloured by what they name."""

from collections.abc import Iterator
from pathlib import PurePath

from .document import Document
from .mentions import Mention
from .moved import Moved
from .sent import Sent, sent

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
    lines = {it.line for rank in facts.sent for it in rank if it.bytes >= LEAST}
    for number in sorted(
        int(line.removeprefix(f"{name}:")) for line in lines if line.startswith(f"{name}:")
    ):
        place = moved.now(number) if moved else number
        if place and first <= place <= last:
            found = sent(
                facts.sent,
                lambda it, line=f"{name}:{number}": it.line == line and it.bytes >= LEAST,
            )
            yield place, " · ".join(map(_short, found))


def _short(it: Sent) -> str:
    """For instance `bwd reduce_scatter tp 256.0 MiB × 126`."""
    return f"{BACKWARD.get(it.where, '')}{it.op} {'×'.join(it.axes)} {it}"


def colours(document: Document) -> Iterator[Mention]:
    """The names of the text as it is now, each with its place there, in order."""
    path, end = document.source.path, (0, 0)
    for it in document.syntax.mentions if document.syntax else ():
        span = document.here(it.span) if it.span.path == path else None
        if span and span.start >= end:
            end = (span.end_line, span.end_column)
            yield Mention(it.kind, it.name, span, it.binds)
