"""The parts of a plan, one inside the other: its sections, its model, the statements in it."""

from collections.abc import Iterator

from attrs import evolve, frozen

from ...compiler.syntax import tree
from ...compiler.syntax.source import Span
from .document import Document
from .mentions import DECLARING, Kind

BLOCKS: dict[type, Kind] = {
    tree.Use: Kind.FILE,
    tree.Model: Kind.MODEL,
    tree.UserOp: Kind.OP,
    tree.Section: Kind.SECTION,
    tree.Repeat: Kind.SECTION,
    tree.If: Kind.SECTION,
    tree.Route: Kind.SECTION,
    tree.Init: Kind.SECTION,
    tree.Rule: Kind.DIM,
}
"""The kinds of parts that are named by all that is before their brace."""

Node = tree.Use | tree.Model | tree.UserOp | tree.Init | tree.Entry | tree.Statement


@frozen
class Part:
    """A part, with the place of its name, and the parts in it."""

    name: str
    kind: Kind
    span: Span
    head: Span
    parts: tuple["Part", ...] = ()


def outline(document: Document) -> Iterator[Part]:
    """The parts of the last text that was a plan, at their places now.

    A part that an edit removed is left out.
    """
    for item in document.syntax.plans[0].items if document.syntax else ():
        yield from _part(document, item, Kind.SETTING)


def _part(document: Document, node: Node, kind: Kind) -> Iterator[Part]:
    """A node as a part; settings in the section around it are of a `kind`."""
    match node:
        case tree.Bind(names=names):
            name, kind, head = ", ".join(map(str, names)), Kind.VALUE, names[0].span
        case tree.Setting(key=key):
            name, head = key.name, key.span
        case _:
            name = node.span.words.partition("{")[0].strip()
            kind = BLOCKS[node.__class__]
            start = node.span
            head = evolve(start, end_line=start.line, end_column=start.column + len(name))
    inner_kind = DECLARING.get(name, Kind.SETTING)
    inner_parts = list[Part]()
    for field in ("sections", "entries", "body", "others"):
        for inner in getattr(node, field, ()):
            inner_parts += _part(document, inner, inner_kind)
    span, head = document.to_current_span(node.span), document.to_current_span(head)
    if span and head:
        yield Part(name, kind, span, head, tuple(inner_parts))
