"""Mistakes and warnings as an editor shows them, and the edits that mend them."""

from collections.abc import Iterator

from attrs import frozen

from ...reports.diagnostic_formats import full_text
from ...syntax.diagnostics import Diagnostic, Note
from ...syntax.fixes import Fix, fixes
from ...syntax.source import Span
from .document import Document
from .mentions import Kind


@frozen
class Told:
    """A diagnostic at a place of the document, with all of its words."""

    of: Diagnostic
    span: Span
    text: str
    notes: tuple[Note, ...]


def told(document: Document) -> list[Told]:
    """The mistakes and warnings of a document; those in a file that it uses are at the place
    that names that.
    """
    return [_told(document, each) for each in (*document.mistakes, *document.later)]


def _told(document: Document, it: Diagnostic) -> Told:
    notes = tuple(note for note in it.notes if note.span)
    span = it.span
    if span.path != document.source.path:
        notes, span = (Note(span, it.label or it.message), *notes), _use(document)
    return Told(it, span, full_text(it), notes)


def _use(document: Document) -> Span:
    """The first place that names another file."""
    used = (
        [it.span for it in document.syntax.mentions if it.kind is Kind.FILE]
        if document.syntax
        else []
    )
    return (document.here(used[0]) if used else None) or document.source.whole()


@frozen
class Action:
    """An edit that an editor offers for a diagnostic."""

    title: str
    of: Told
    fix: Fix


def actions(document: Document, first: int, last: int) -> Iterator[Action]:
    """The edits for what is wrong in these lines."""
    for each in told(document):
        if each.span.line <= last and first <= max(each.span.end_line, each.span.line):
            for fix in fixes(each.of):
                title = (
                    f"write `{fix.text}`" if fix.text else f"leave `{fix.span.words.strip()}` out"
                )
                yield Action(title, each, fix)
