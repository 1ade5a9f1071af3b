"""The language server: requests of an editor answered by the functions beside this module.

Non-goals: answers (`hover`, `navigate`, `complete`, …), which are pure and of places counted from 1.
"""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcException
from pygls.lsp.server import LanguageServer
from pygls.uris import from_fs_path, to_fs_path

from ... import __version__
from ...syntax.diagnostics import PlanError
from ...syntax.formatter import format_plan
from ...syntax.limits import load
from ...syntax.source import Source, Span
from . import navigate
from .complete import complete
from .diagnose import Action, Told, actions, told
from .document import Document, Overtaken, compiled, same_file, typed
from .hints import TYPES, colours, hints
from .hover import hover
from .mentions import Kind, Mention

PAUSE = 0.2
"""Seconds without a key stroke after which the step is compiled."""


def serve() -> None:
    """Answers an editor on standard input and output until it leaves."""
    with TemporaryDirectory(prefix="scalec-lsp-") as folder:
        Server(Path(folder)).start_io()


class Server(LanguageServer):
    """The documents that an editor has open, by path; `folder` is where emitted programs are shown."""

    def __init__(self, folder: Path) -> None:
        super().__init__("scalec", __version__)  # pyright: ignore[reportUnknownMemberType]
        self.folder = folder
        self.documents: dict[str, Document] = {}
        self._pauses: dict[str, asyncio.Task[None]] = {}
        for feature, answer in FEATURES.items():
            self.feature(feature)(answer)
        for feature, (answer, options) in FEATURES_WITH_OPTIONS.items():
            self.feature(feature, options)(answer)

    # ---- documents

    def read(self, path: Path, at: Span) -> Source:
        """A file as the editor has it, or else as it lies on disk.  Raises PlanError."""
        opened = self.documents.get(str(path.resolve()))
        return Source(str(path), opened.source.text) if opened else load(path, at)

    def document(self, uri: str) -> Document | None:
        """An open document; of a model that an open plan uses, that plan's."""
        document = self.documents.get(path_of(uri))
        if not document or document.facts:
            return document
        seen = (other.of_file(document.source) for other in reversed(self.documents.values()) if other.facts)
        return next((each for each in seen if each), document)

    def changed(self, uri: str, text: str) -> None:
        """Takes a new text, says at once what is wrong with it and with plans that use it; compiles after a pause."""
        path = path_of(uri)
        self._typed(Source(path, text))
        for other in list(self.documents.values()):
            if other.syntax and any(same_file(plan.span.path, path) for plan in other.syntax.plans[1:]):
                self._typed(other.source)

    def _typed(self, source: Source) -> None:
        path = source.path
        self.documents[path] = document = typed(self.documents.get(path), source, self.read)
        self._publish(document)
        if pause := self._pauses.get(path):
            pause.cancel()
        self._pauses[path] = asyncio.get_running_loop().create_task(self._compile(document))

    async def _compile(self, document: Document) -> None:
        await asyncio.sleep(PAUSE)
        path = document.source.path
        try:
            found = await asyncio.to_thread(compiled, document, lambda: self.documents.get(path) is not document)
        except Overtaken:
            return
        if self.documents.get(path) is document:
            self.documents[path] = found
            self._publish(found)
            if self._refreshes():
                self.workspace_inlay_hint_refresh(None)

    def _refreshes(self) -> bool:
        workspace = self.client_capabilities.workspace
        return bool(workspace and workspace.inlay_hint and workspace.inlay_hint.refresh_support)

    def closed(self, uri: str) -> None:
        """Forgets a document."""
        if pause := self._pauses.pop(path_of(uri), None):
            pause.cancel()
        self.documents.pop(path_of(uri), None)
        self.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(uri, []))

    def _publish(self, document: Document) -> None:
        found = [_diagnostic(each) for each in told(document)]
        self.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(uri_of(document.source.path), found))

    def in_workspace(self) -> list[Document]:
        """The open documents, and all other plans in the editor's folders."""
        folders = [path_of(folder.uri) for folder in self.workspace.folders.values()]
        paths = {str(path.resolve()) for folder in folders for path in Path(folder).rglob("*.scale")}
        others = list[Document]()
        for path in sorted(paths - self.documents.keys()):
            try:
                others.append(typed(None, load(Path(path)), self.read))
            except PlanError:
                continue
        return [*self.documents.values(), *others]


# ---- answers


def did_open(server: Server, it: lsp.DidOpenTextDocumentParams) -> None:
    server.changed(it.text_document.uri, it.text_document.text)


def did_change(server: Server, it: lsp.DidChangeTextDocumentParams) -> None:
    server.changed(it.text_document.uri, server.workspace.get_text_document(it.text_document.uri).source)


def did_close(server: Server, it: lsp.DidCloseTextDocumentParams) -> None:
    server.closed(it.text_document.uri)


def on_hover(server: Server, it: lsp.HoverParams) -> lsp.Hover | None:
    if not (document := server.document(it.text_document.uri)):
        return None
    found = hover(document, *place_of(document.source, it.position))
    if not found:
        return None
    return lsp.Hover(lsp.MarkupContent(lsp.MarkupKind.Markdown, found.text), range_of(found.span))


def on_definition(server: Server, it: lsp.DefinitionParams) -> lsp.Location | None:
    if not (document := server.document(it.text_document.uri)):
        return None
    found = navigate.definition(document, *place_of(document.source, it.position))
    return location(found) if found else None


def on_implementation(server: Server, it: lsp.ImplementationParams) -> list[lsp.Location]:
    """The lines of `train.py` that come from a line of the plan, in a copy that is only to be read."""
    if not (document := server.document(it.text_document.uri)) or not document.facts:
        return []
    line, _ = place_of(document.source, it.position)
    now = Span(document.source.path, line, 1, line, 1, document.source.text)
    text, lines = navigate.emitted(document.facts, now)
    path = server.folder / Path(document.source.path).stem / "train.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return [location(Span(str(path), at, 1, at, 1, text)) for at in lines]


def _mentioned(server: Server, it: lsp.ReferenceParams | lsp.RenameParams) -> tuple[list[Document], Mention] | None:
    """The name at a place, and the documents in which it means the same."""
    document = server.document(it.text_document.uri)
    mention = document.mention(*place_of(document.source, it.position)) if document else None
    return (navigate.users(document, mention, server.in_workspace()), mention) if document and mention else None


def on_references(server: Server, it: lsp.ReferenceParams) -> list[lsp.Location]:
    if not (found := _mentioned(server, it)):
        return []
    return [location(span) for span in navigate.references(*found, binding=it.context.include_declaration)]


def on_rename(server: Server, it: lsp.RenameParams) -> lsp.WorkspaceEdit | None:
    if not (found := _mentioned(server, it)):
        return None
    try:
        spans = navigate.renamed(*found, it.new_name)
    except PlanError as error:
        raise refused(error) from None
    edits: dict[str, list[lsp.TextEdit]] = {}
    for span in spans:
        edits.setdefault(uri_of(span.path), []).append(lsp.TextEdit(range_of(span), it.new_name))
    return lsp.WorkspaceEdit(edits)


def on_formatting(server: Server, it: lsp.DocumentFormattingParams) -> list[lsp.TextEdit]:
    """The text in scalec's layout; a plan with a syntax error is left alone."""
    document = server.document(it.text_document.uri)
    try:
        text = format_plan(document.source) if document else ""
    except PlanError:
        return []
    lines = document.source.text.count("\n") + 1 if document else 0
    return [lsp.TextEdit(lsp.Range(lsp.Position(0, 0), lsp.Position(lines, 0)), text)] if text else []


def on_code_action(server: Server, it: lsp.CodeActionParams) -> list[lsp.CodeAction]:
    if not (document := server.document(it.text_document.uri)):
        return []
    found = actions(document, it.range.start.line + 1, it.range.end.line + 1)
    return [_action(each) for each in found]


def _action(it: Action) -> lsp.CodeAction:
    edit = lsp.TextEdit(range_of(it.fix.span), it.fix.text)
    return lsp.CodeAction(
        it.title,
        lsp.CodeActionKind.QuickFix,
        diagnostics=[_diagnostic(it.of)],
        edit=lsp.WorkspaceEdit({uri_of(it.fix.span.path): [edit]}),
    )


def on_inlay_hint(server: Server, it: lsp.InlayHintParams) -> list[lsp.InlayHint]:
    if not (document := server.document(it.text_document.uri)):
        return []
    lines = document.source.text.split("\n")
    found = hints(document, it.range.start.line + 1, it.range.end.line + 1)
    return [
        lsp.InlayHint(position(lines[line - 1], line, len(lines[line - 1]) + 1), text, padding_left=True)
        for line, text in found
        if line <= len(lines)
    ]


def on_semantic_tokens(server: Server, it: lsp.SemanticTokensParams) -> lsp.SemanticTokens:
    """Each token by five numbers, its line and column relative to the one before."""
    document, data, before = server.document(it.text_document.uri), list[int](), lsp.Position(0, 0)
    for each in colours(document) if document else ():
        if each.span.line == each.span.end_line:
            at = range_of(each.span)
            column = at.start.character - (before.character if at.start.line == before.line else 0)
            kind = TOKEN_TYPES.index(TYPES[each.kind])
            data += [at.start.line - before.line, column, at.end.character - at.start.character, kind, int(each.binds)]
            before = at.start
    return lsp.SemanticTokens(data)


def on_completion(server: Server, it: lsp.CompletionParams) -> list[lsp.CompletionItem]:
    if not (document := server.document(it.text_document.uri)):
        return []
    found = complete(document, *place_of(document.source, it.position))
    return [
        lsp.CompletionItem(
            each.label, kind=ITEM_KINDS[each.kind], detail=each.detail or None, documentation=each.doc or None
        )
        for each in found
    ]


ITEM_KINDS = {
    Kind.DIM: lsp.CompletionItemKind.TypeParameter,
    Kind.AXIS: lsp.CompletionItemKind.Enum,
    Kind.CONST: lsp.CompletionItemKind.Constant,
    Kind.VALUE: lsp.CompletionItemKind.Variable,
    Kind.PARAM: lsp.CompletionItemKind.Field,
    Kind.OP: lsp.CompletionItemKind.Function,
    Kind.ARGUMENT: lsp.CompletionItemKind.Property,
    Kind.SECTION: lsp.CompletionItemKind.Module,
    Kind.SETTING: lsp.CompletionItemKind.Property,
    Kind.WORD: lsp.CompletionItemKind.EnumMember,
}

TOKEN_TYPES = sorted(set(TYPES.values()))

FEATURES = {
    lsp.TEXT_DOCUMENT_DID_OPEN: did_open,
    lsp.TEXT_DOCUMENT_DID_CHANGE: did_change,
    lsp.TEXT_DOCUMENT_DID_CLOSE: did_close,
    lsp.TEXT_DOCUMENT_HOVER: on_hover,
    lsp.TEXT_DOCUMENT_DEFINITION: on_definition,
    lsp.TEXT_DOCUMENT_IMPLEMENTATION: on_implementation,
    lsp.TEXT_DOCUMENT_REFERENCES: on_references,
    lsp.TEXT_DOCUMENT_RENAME: on_rename,
    lsp.TEXT_DOCUMENT_FORMATTING: on_formatting,
    lsp.TEXT_DOCUMENT_CODE_ACTION: on_code_action,
    lsp.TEXT_DOCUMENT_INLAY_HINT: on_inlay_hint,
}

FEATURES_WITH_OPTIONS = {
    lsp.TEXT_DOCUMENT_COMPLETION: (on_completion, lsp.CompletionOptions(trigger_characters=["=", "[", "(", ","])),
    lsp.TEXT_DOCUMENT_SEMANTIC_TOKENS_FULL: (
        on_semantic_tokens,
        lsp.SemanticTokensLegend(TOKEN_TYPES, [lsp.SemanticTokenModifiers.Definition]),
    ),
}


# ---- places and texts of the protocol: lines and columns from 0, in units of UTF-16


def path_of(uri: str) -> str:
    """The path of a document; of one that is no file, its URI."""
    path = to_fs_path(uri)
    return str(Path(path).resolve()) if path and uri.startswith("file:") else uri


def uri_of(path: str) -> str:
    """The URI of a path."""
    return path if ":" in path.split("/")[0] else from_fs_path(str(Path(path).resolve())) or path


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


def _diagnostic(it: Told) -> lsp.Diagnostic:
    severity = lsp.DiagnosticSeverity.Error if it.of.severity == "error" else lsp.DiagnosticSeverity.Warning
    related = [lsp.DiagnosticRelatedInformation(location(note.span), note.text) for note in it.notes if note.span]
    return lsp.Diagnostic(
        range_of(it.span), it.text, severity, it.of.code, source="scalec", related_information=related
    )


def refused(error: PlanError) -> JsonRpcException:
    """A request that cannot be met, with the reason."""
    return JsonRpcException(error.diagnostics[0].message, lsp.LSPErrorCodes.RequestFailed)
