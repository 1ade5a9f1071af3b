"""Mistakes and warnings as an editor shows them, and the edits that mend them."""

from collections.abc import Iterator

from attrs import frozen

from ...compiler.reports.diagnostic_formats import full_text
from ...compiler.syntax.diagnostics import Diagnostic, Note
from ...compiler.syntax.fixes import Fix, fixes
from ...compiler.syntax.source import Span
from .document import Document
from .mentions import Kind


@frozen
class ShownDiagnostic:
    """A diagnostic at a place of the document, with all of its words."""

    of: Diagnostic
    span: Span
    text: str
    notes: tuple[Note, ...]


def get_shown_diagnostics(document: Document) -> list[ShownDiagnostic]:
    """The mistakes and warnings of a document.

    A diagnostic in a file that the document uses is at the place that names the file.
    """
    return [
        _to_shown_diagnostic(document, diagnostic)
        for diagnostic in (*document.mistakes, *document.compile_diagnostics)
    ]


def _to_shown_diagnostic(document: Document, diagnostic: Diagnostic) -> ShownDiagnostic:
    notes = tuple(note for note in diagnostic.notes if note.span)
    span = diagnostic.span
    if span.path != document.source.path:
        notes = (Note(span, diagnostic.label or diagnostic.message), *notes)
        span = _use(document)
    return ShownDiagnostic(diagnostic, span, full_text(diagnostic), notes)


def _use(document: Document) -> Span:
    """The first place that names another file."""
    for mention in document.mentions:
        if mention.kind is Kind.FILE:
            return document.to_current_span(mention.span) or document.source.whole()
    return document.source.whole()


@frozen
class Action:
    """An edit that an editor offers for a diagnostic."""

    title: str
    diagnostic: ShownDiagnostic
    fix: Fix


def actions(document: Document, first: int, last: int) -> Iterator[Action]:
    """The edits for diagnostics in the lines from `first` to `last`."""
    for diagnostic in get_shown_diagnostics(document):
        span = diagnostic.span
        if span.line > last or max(span.end_line, span.line) < first:
            continue
        for fix in fixes(diagnostic.of):
            title = f"leave `{fix.span.words.strip()}` out"
            if fix.text:
                title = f"write `{fix.text}`"
            yield Action(title, diagnostic, fix)
