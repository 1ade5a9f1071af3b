"""Collectives beside the lines that cause them, and names coloured by their kind."""

from collections.abc import Iterator
from pathlib import PurePath

from .document import Document
from .mentions import Mention
from .moved import TextChange
from .sent import CollectiveGroup, find_collectives

LEAST = 1024
"""The least bytes of a collective that is shown."""

BACKWARD = {"backward": "bwd ", "step": "step "}


def hints(document: Document, first: int, last: int) -> Iterator[tuple[int, str]]:
    """For each line from `first` to `last` that communicates, its number and its collectives in
    short.
    """
    facts = document.facts
    if not facts:
        return
    path, name = document.source.path, PurePath(document.source.path).name
    moved = TextChange(facts.source, document.source) if path == facts.source.path else None
    prefix = f"{name}:"
    numbers = set[int]()
    for rank in facts.collectives_by_rank:
        for collective in rank:
            if collective.bytes >= LEAST and collective.line.startswith(prefix):
                numbers.add(int(collective.line.removeprefix(prefix)))
    for number in sorted(numbers):
        place = moved.now(number) if moved else number
        if place and first <= place <= last:
            collectives = find_collectives(
                facts.collectives_by_rank,
                lambda collective, line=f"{prefix}{number}": (
                    collective.line == line and collective.bytes >= LEAST
                ),
            )
            yield place, " · ".join(map(_short, collectives))


def _short(collectives: CollectiveGroup) -> str:
    """For instance `bwd reduce_scatter tp 256.0 MiB × 126`."""
    where = BACKWARD.get(collectives.where, "")
    return f"{where}{collectives.op} {'×'.join(collectives.axes)} {collectives}"


def colours(document: Document) -> Iterator[Mention]:
    """The names of the text as it is now, each with its place there, in order."""
    path, end = document.source.path, (0, 0)
    for mention in document.mentions:
        if mention.span.path != path:
            continue
        span = document.to_current_span(mention.span)
        if span and span.start >= end:
            end = (span.end_line, span.end_column)
            yield Mention(mention.kind, mention.name, span, mention.binds)
