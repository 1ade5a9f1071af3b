"""Places and texts as the protocol has them: lines and columns from 0, files by URI."""

import re
from collections.abc import Mapping
from pathlib import Path

from attrs import field, frozen
from lsprotocol import types as lsp
from pygls.uris import from_fs_path, to_fs_path

from ...compiler.syntax.source import Source, Span
from .diagnose import ShownDiagnostic

UNITS = {"utf-8": ("utf-8", 1), "utf-16": ("utf-16-le", 2), "utf-32": ("utf-32-le", 4)}
"""By the protocol's name of an encoding: Python's name, of the variant without a byte order mark,
and the bytes of a unit.
"""


def path_of(uri: str) -> str:
    """The path of a document; for a document that is no file, its URI."""
    path = to_fs_path(uri)
    return str(Path(path).resolve()) if path and uri.startswith("file:") else uri


@frozen
class Wire:
    """Places in units of the encoding that server and editor have agreed on.

    uris  by path, the URI that the editor has opened: the file has another one too where its
          folder is a link
    """

    encoding: str
    uris: Mapping[str, str] = field(factory=dict[str, str])

    def uri_of(self, path: str) -> str:
        """The URI of a path."""
        if re.match(r"\w{2,}:", path):
            return path
        whole = str(Path(path).resolve())
        return self.uris.get(whole) or from_fs_path(whole) or path

    def place_of(self, source: Source, position: lsp.Position) -> tuple[int, int]:
        """Line and column, from 1, in characters."""
        name, bytes = UNITS[self.encoding]
        lines = source.text.split("\n")
        line = lines[position.line] if position.line < len(lines) else ""
        before = line.encode(name, "surrogatepass")[: bytes * position.character]
        return position.line + 1, len(before.decode(name, "ignore")) + 1

    def range_of(self, span: Span) -> lsp.Range:
        """The range of a span; of a file as a whole, its first line."""
        lines = span.text.split("\n")
        if not span.line:
            return lsp.Range(lsp.Position(0, 0), self._position(lines[0], 1, len(lines[0]) + 1))
        lines.append("")  # a span may end on the line after the last one
        text = lines[min(span.line, len(lines)) - 1]
        end_text = lines[min(span.end_line, len(lines)) - 1]
        begin = self._position(text, span.line, span.column)
        return lsp.Range(begin, self._position(end_text, span.end_line, span.end_column))

    def _position(self, text: str, line: int, column: int) -> lsp.Position:
        """The position of a column in a line of this text."""
        name, bytes = UNITS[self.encoding]
        before = text[: max(column - 1, 0)].encode(name, "surrogatepass")
        return lsp.Position(max(line - 1, 0), len(before) // bytes)

    def location(self, span: Span) -> lsp.Location:
        """The location of a span."""
        return lsp.Location(self.uri_of(span.path), self.range_of(span))

    def diagnostic(self, diagnostic: ShownDiagnostic) -> lsp.Diagnostic:
        """A mistake or a warning, with the places of its notes."""
        notes = [
            lsp.DiagnosticRelatedInformation(self.location(note.span), note.text)
            for note in diagnostic.notes
            if note.span
        ]
        severity = lsp.DiagnosticSeverity.Warning
        if diagnostic.of.severity == "error":
            severity = lsp.DiagnosticSeverity.Error
        return lsp.Diagnostic(
            self.range_of(diagnostic.span),
            diagnostic.text,
            severity,
            diagnostic.of.code,
            source="scalec",
            related_information=notes,
        )
