"""Places and texts as the protocol has them: lines and columns from 0, in units of UTF-16; files by URI."""

import re
from pathlib import Path

from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcException
from pygls.uris import from_fs_path, to_fs_path

from ...syntax.diagnostics import PlanError
from ...syntax.source import Source, Span
from .diagnose import Told


def path_of(uri: str) -> str:
    """The path of a document; of one that is no file, its URI."""
    path = to_fs_path(uri)
    return str(Path(path).resolve()) if path and uri.startswith("file:") else uri


def uri_of(path: str) -> str:
    """The URI of a path."""
    return path if re.match(r"\w{2,}:", path) else from_fs_path(str(Path(path).resolve())) or path


def place_of(source: Source, at: lsp.Position) -> tuple[int, int]:
    """Line and column, from 1."""
    lines = source.text.split("\n")
    line = lines[at.line] if at.line < len(lines) else ""
    return at.line + 1, len(line.encode("utf-16-le")[: 2 * at.character].decode("utf-16-le", "ignore")) + 1


def position(text: str, line: int, column: int) -> lsp.Position:
    """The position of a column in a line of this text."""
    return lsp.Position(max(line - 1, 0), len(text[: max(column - 1, 0)].encode("utf-16-le")) // 2)


def range_of(span: Span) -> lsp.Range:
    """The range of a span; of a file as a whole, its first line."""
    if not span.line:
        return lsp.Range(lsp.Position(0, 0), lsp.Position(0, len(span.text.split("\n")[0])))
    lines = span.text.split("\n")
    text, end_text = ((*lines, "")[min(at - 1, len(lines))] for at in (span.line, span.end_line))
    return lsp.Range(position(text, span.line, span.column), position(end_text, span.end_line, span.end_column))


def location(span: Span) -> lsp.Location:
    """The location of a span."""
    return lsp.Location(uri_of(span.path), range_of(span))


def as_diagnostic(it: Told) -> lsp.Diagnostic:
    severity = lsp.DiagnosticSeverity.Error if it.of.severity == "error" else lsp.DiagnosticSeverity.Warning
    related = [lsp.DiagnosticRelatedInformation(location(note.span), note.text) for note in it.notes if note.span]
    return lsp.Diagnostic(
        range_of(it.span), it.text, severity, it.of.code, source="scalec", related_information=related
    )


def refused(error: PlanError) -> JsonRpcException:
    """A request that cannot be met, with the reason."""
    return JsonRpcException(error.diagnostics[0].message, lsp.LSPErrorCodes.RequestFailed)
