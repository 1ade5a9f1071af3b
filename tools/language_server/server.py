"""The language server: requests of an editor answered by the functions beside this module.

Non-goals: the answers, which are pure (`hover`, `navigate`, `complete`, …), and the protocol's
places (`wire`).
"""

import asyncio
import os
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcException
from pygls.lsp.server import LanguageServer

from ...compiler import __version__
from ...compiler.frontend.arguments import signature
from ...compiler.syntax.diagnostics import PlanError
from ...compiler.syntax.limits import load
from ...compiler.syntax.source import Source, Span
from ..formatter import format_plan
from . import navigate
from .complete import call_at, complete
from .diagnose import Action, actions, get_shown_diagnostics
from .document import Document, Overtaken, compile_document, parse_document, same_file, syntax_of
from .hints import colours, hints
from .hover import hover
from .mentions import Kind, Mention
from .outline import Part, outline
from .wire import Wire, path_of

PAUSE = 0.2
"""Seconds without a key stroke after which the step is compiled."""

PLANS = 500
"""How many plans of an editor's folders are looked through for a name."""


def serve() -> None:
    """Answers an editor on standard input and output until it leaves."""
    # A print anywhere in scalec goes to standard error, and does not break the protocol.
    stdout = open(os.dup(sys.stdout.fileno()), "wb")  # noqa: SIM115 (the server closes it)
    with TemporaryDirectory(prefix="scalec-lsp-") as folder, redirect_stdout(sys.stderr):
        Server(Path(folder)).start_io(stdout=stdout)


class Server(LanguageServer):
    """The documents that an editor has open, by path; `folder` is where emitted programs are
    shown.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__("scalec", __version__)  # pyright: ignore[reportUnknownMemberType]
        self.folder = folder
        self.documents: dict[str, Document] = {}
        self._uris: dict[str, str] = {}
        self._published: dict[str, list[lsp.Diagnostic]] = {}
        self._pauses: dict[str, asyncio.Task[None]] = {}
        self._compiling = asyncio.Lock()
        for feature, (answer, options) in ANSWERS.items():
            self.feature(feature, options)(_request_handler(answer))
        for feature, take in {
            lsp.TEXT_DOCUMENT_DID_OPEN: Server.update_document,
            lsp.TEXT_DOCUMENT_DID_CHANGE: Server.update_document,
            lsp.TEXT_DOCUMENT_DID_CLOSE: Server.forget_document,
        }.items():
            self.feature(feature)(_notification_handler(take))

    @property
    def wire(self) -> Wire:
        """Places as this editor counts them."""
        return Wire(lsp.PositionEncodingKind(self.workspace.position_encoding).value, self._uris)

    def load_source(self, path: Path, place: Span) -> Source:
        """A file as the editor has it, or else as it lies on disk.  Raises PlanError."""
        document = self.documents.get(str(path.resolve()))
        if document:
            return Source(str(path), document.source.text)
        return load(path, place)

    def document(self, uri: str) -> Document | None:
        """An open document; where it is a model that an open plan uses, that plan's view of it."""
        document = self.documents.get(path_of(uri))
        if not document or document.facts:
            return document
        for other in reversed(self.documents.values()):
            view = other.get_view_from_file(document.source) if other.facts else None
            if view:
                return view
        return document

    def others(self) -> Iterator[Document]:
        """All plans that a name may be in: the open ones, then others of the editor's folders."""
        yield from self.documents.values()
        paths = set[str]()
        for folder in self.workspace.folders.values():
            root = Path(path_of(folder.uri))
            for path in root.rglob("*.scale"):
                if not any(part.startswith(".") for part in path.relative_to(root).parts):
                    paths.add(str(path.resolve()))
        for path in sorted(paths - self.documents.keys())[:PLANS]:
            with suppress(PlanError):
                source = load(Path(path))
                yield Document(source, syntax_of(source, self.load_source))

    def update_document(self, uri: str) -> None:
        """Takes a new text, publishes at once its mistakes and the mistakes of plans that use it;
        compiles after a pause.
        """
        path = path_of(uri)
        self._uris[path] = uri
        self._parse(Source(path, self.workspace.get_text_document(uri).source))
        self._reparse_users(path)

    def _reparse_users(self, path: str) -> None:
        """Reads the open plans that use a file."""
        for document in list(self.documents.values()):
            used = document.syntax.plans[1:] if document.syntax else ()
            if any(same_file(plan.span.path, path) for plan in used):
                self._parse(document.source)

    def _parse(self, source: Source) -> None:
        path = source.path
        document = parse_document(self.documents.get(path), source, self.load_source)
        self.documents[path] = document
        self._publish(document)
        self._forget_pause(path)
        self._pauses[path] = asyncio.get_running_loop().create_task(self._compile(document))

    async def _compile(self, document: Document) -> None:
        await asyncio.sleep(PAUSE)
        path = document.source.path

        def is_stale() -> bool:
            return self.documents.get(path) is not document

        async with self._compiling:
            try:
                result = await asyncio.to_thread(compile_document, document, is_stale)
            except Overtaken:
                return
            except Exception:
                words = f"this is a bug in scalec, at {path}:\n{traceback.format_exc()}"
                self.window_log_message(lsp.LogMessageParams(lsp.MessageType.Error, words))
                return
        if not is_stale():
            self.documents[path] = result
            self._publish(result)
            workspace = self.client_capabilities.workspace
            if workspace and workspace.inlay_hint and workspace.inlay_hint.refresh_support:
                self.workspace_inlay_hint_refresh(None)

    def forget_document(self, uri: str) -> None:
        """Forgets a document, so that the editor shows its mistakes no more.

        Open plans that use it read it from disk.
        """
        path = path_of(uri)
        self._forget_pause(path)
        if self.documents.pop(path, None):
            self._tell(path, [])
            del self._published[path], self._uris[path]
            self._reparse_users(path)

    def _forget_pause(self, path: str) -> None:
        """Cancels the compile of a document."""
        if pause := self._pauses.pop(path, None):
            pause.cancel()

    def _publish(self, document: Document) -> None:
        self._tell(
            document.source.path, [*map(self.wire.diagnostic, get_shown_diagnostics(document))]
        )

    def _tell(self, path: str, diagnostics: list[lsp.Diagnostic]) -> None:
        """Shows the diagnostics of a document, unless the editor shows the same already."""
        if self._published.get(path) != diagnostics:
            self._published[path] = diagnostics
            version = self.workspace.get_text_document(self._uris[path]).version
            self.text_document_publish_diagnostics(
                lsp.PublishDiagnosticsParams(self._uris[path], diagnostics, version)
            )


def _notification_handler(take: Callable[[Server, str], None]) -> Callable[[Server, Any], None]:
    """The handler of a notification about a document."""
    return lambda ls, params: take(ls, params.text_document.uri)


# ---- answers about a document


Answer = Callable[[Document, Any, Server], object]


def _request_handler(answer: Answer) -> Callable[[Server, Any], object]:
    """The handler of a request about a document; the answer is None where it is not open."""

    def handle(ls: Server, params: Any) -> object:
        document = ls.document(params.text_document.uri)
        return answer(document, params, ls) if document else None

    return handle


def on_hover(document: Document, params: lsp.HoverParams, ls: Server) -> lsp.Hover | None:
    place = ls.wire.place_of(document.source, params.position)
    text = hover(document, *place)
    return text and lsp.Hover(
        lsp.MarkupContent(lsp.MarkupKind.Markdown, text.text), ls.wire.range_of(text.span)
    )


def on_definition(
    document: Document, params: lsp.DefinitionParams, ls: Server
) -> lsp.Location | None:
    place = ls.wire.place_of(document.source, params.position)
    span = navigate.definition(document, *place)
    return span and ls.wire.location(span)


def on_implementation(
    document: Document, params: lsp.ImplementationParams, ls: Server
) -> list[lsp.Location]:
    """The lines of `train.py` that come from a line of the plan, in a copy that is only to be
    read.
    """
    if not document.facts:
        return []
    line, _ = ls.wire.place_of(document.source, params.position)
    text, numbers = navigate.find_emitted_lines(
        document.facts, Span(document.source.path, line, 1, line, 1)
    )
    path = ls.folder / Path(document.facts.source.path).stem / "train.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return [ls.wire.location(Span(str(path), number, 1, number, 1, text)) for number in numbers]


def _find_mention(
    document: Document, position: lsp.Position, ls: Server
) -> tuple[list[Document], Mention] | None:
    """The documents where the name at a place means the same, and the name."""
    mention = document.mention(*ls.wire.place_of(document.source, position))
    if not mention:
        return None
    return navigate.users(document, mention, ls.others()), mention


def on_references(
    document: Document, params: lsp.ReferenceParams, ls: Server
) -> list[lsp.Location]:
    mentioned = _find_mention(document, params.position, ls)
    if not mentioned:
        return []
    spans = navigate.references(*mentioned, binding=params.context.include_declaration)
    return [*map(ls.wire.location, spans)]


def on_prepare_rename(
    document: Document, params: lsp.PrepareRenameParams, ls: Server
) -> lsp.Range | None:
    """The name that would be replaced."""
    mentioned = _find_mention(document, params.position, ls)
    if not mentioned:
        return None
    documents, mention = mentioned
    with _report_plan_errors():
        navigate.find_renamable_spans(documents, mention)
    span = document.to_current_span(mention.span)
    return span and ls.wire.range_of(span)


def on_rename(document: Document, params: lsp.RenameParams, ls: Server) -> lsp.WorkspaceEdit | None:
    mentioned = _find_mention(document, params.position, ls)
    if not mentioned:
        return None
    edits: dict[str, list[lsp.TextEdit]] = {}
    with _report_plan_errors():
        for span in navigate.find_rename_spans(*mentioned, params.new_name):
            edit = lsp.TextEdit(ls.wire.range_of(span), params.new_name)
            edits.setdefault(ls.wire.uri_of(span.path), []).append(edit)
    return lsp.WorkspaceEdit(edits)


@contextmanager
def _report_plan_errors() -> Generator[None]:
    """Tells an editor why a request cannot be met."""
    try:
        yield
    except PlanError as error:
        raise JsonRpcException(
            error.diagnostics[0].message, lsp.LSPErrorCodes.RequestFailed
        ) from None


def on_formatting(
    document: Document, _: lsp.DocumentFormattingParams, ls: Server
) -> list[lsp.TextEdit]:
    """The text in scalec's layout; a plan with a syntax error is left alone."""
    try:
        text = format_plan(document.source)
    except PlanError:
        return []
    end = lsp.Position(document.source.text.count("\n") + 1, 0)
    return [lsp.TextEdit(lsp.Range(lsp.Position(0, 0), end), text)]


def on_code_action(
    document: Document, params: lsp.CodeActionParams, ls: Server
) -> list[lsp.CodeAction]:
    first, last = params.range.start.line + 1, params.range.end.line + 1
    return [_action(action, ls.wire) for action in actions(document, first, last)]


def _action(action: Action, wire: Wire) -> lsp.CodeAction:
    fix = action.fix
    edits = {wire.uri_of(fix.span.path): [lsp.TextEdit(wire.range_of(fix.span), fix.text)]}
    return lsp.CodeAction(
        action.title,
        lsp.CodeActionKind.QuickFix,
        diagnostics=[wire.diagnostic(action.diagnostic)],
        edit=lsp.WorkspaceEdit(edits),
    )


def on_inlay_hint(
    document: Document, params: lsp.InlayHintParams, ls: Server
) -> list[lsp.InlayHint]:
    first, last = params.range.start.line + 1, params.range.end.line + 1
    lines = document.source.text.split("\n")
    inlays = list[lsp.InlayHint]()
    for line, text in hints(document, first, last):
        column = len(lines[line - 1]) + 1
        span = Span("", line, 1, line, column, document.source.text)
        inlays.append(lsp.InlayHint(ls.wire.range_of(span).end, text, padding_left=True))
    return inlays


def on_semantic_tokens(
    document: Document, _: lsp.SemanticTokensParams, ls: Server
) -> lsp.SemanticTokens:
    """Each name by five numbers, its line and column relative to the one before."""
    data, line, column = list[int](), 0, 0
    for mention in colours(document):
        range = ls.wire.range_of(mention.span)
        start, length = range.start, range.end.character - range.start.character
        if start.line != line:
            column = 0
        kind = TOKEN_TYPES.index(mention.kind.token)
        data += [start.line - line, start.character - column, length, kind, int(mention.binds)]
        line, column = start.line, start.character
    return lsp.SemanticTokens(data)


TOKEN_TYPES = sorted({kind.token for kind in Kind})


def on_completion(
    document: Document, params: lsp.CompletionParams, ls: Server
) -> list[lsp.CompletionItem]:
    place = ls.wire.place_of(document.source, params.position)
    kinds = lsp.CompletionItemKind
    return [
        lsp.CompletionItem(item.label, None, kinds[item.kind.item], None, item.detail, item.doc)
        for item in complete(document, *place)
    ]


def on_signature_help(
    document: Document, params: lsp.SignatureHelpParams, ls: Server
) -> lsp.SignatureHelp | None:
    call = call_at(document, *ls.wire.place_of(document.source, params.position))
    if not call:
        return None
    entry, words, argument = call
    information = lsp.SignatureInformation(
        signature(entry), entry.doc, [*map(lsp.ParameterInformation, words)]
    )
    return lsp.SignatureHelp([information], 0, argument)


def on_document_symbol(
    document: Document, _: lsp.DocumentSymbolParams, ls: Server
) -> list[lsp.DocumentSymbol]:
    return [_symbol(part, ls.wire) for part in outline(document)]


def _symbol(part: Part, wire: Wire) -> lsp.DocumentSymbol:
    children = [_symbol(inner, wire) for inner in part.parts]
    kind = lsp.SymbolKind[part.kind.item]
    return lsp.DocumentSymbol(
        part.name, kind, wire.range_of(part.span), wire.range_of(part.head), children=children
    )


def on_folding_range(
    document: Document, _: lsp.FoldingRangeParams, __: Server
) -> list[lsp.FoldingRange]:
    return [*_folds(outline(document))]


def _folds(parts: Iterable[Part]) -> Iterator[lsp.FoldingRange]:
    for part in parts:
        if part.span.end_line > part.span.line:
            yield lsp.FoldingRange(part.span.line - 1, part.span.end_line - 1)
        yield from _folds(part.parts)


ANSWERS: dict[str, tuple[Answer, object]] = {
    lsp.TEXT_DOCUMENT_HOVER: (on_hover, None),
    lsp.TEXT_DOCUMENT_DEFINITION: (on_definition, None),
    lsp.TEXT_DOCUMENT_IMPLEMENTATION: (on_implementation, None),
    lsp.TEXT_DOCUMENT_REFERENCES: (on_references, None),
    lsp.TEXT_DOCUMENT_PREPARE_RENAME: (on_prepare_rename, None),
    lsp.TEXT_DOCUMENT_RENAME: (on_rename, lsp.RenameOptions(prepare_provider=True)),
    lsp.TEXT_DOCUMENT_DOCUMENT_SYMBOL: (on_document_symbol, None),
    lsp.TEXT_DOCUMENT_FOLDING_RANGE: (on_folding_range, None),
    lsp.TEXT_DOCUMENT_SIGNATURE_HELP: (on_signature_help, lsp.SignatureHelpOptions(["(", ","])),
    lsp.TEXT_DOCUMENT_FORMATTING: (on_formatting, None),
    lsp.TEXT_DOCUMENT_CODE_ACTION: (
        on_code_action,
        lsp.CodeActionOptions([lsp.CodeActionKind.QuickFix]),
    ),
    lsp.TEXT_DOCUMENT_INLAY_HINT: (on_inlay_hint, None),
    lsp.TEXT_DOCUMENT_COMPLETION: (
        on_completion,
        lsp.CompletionOptions(trigger_characters=["=", "[", "(", ","]),
    ),
    lsp.TEXT_DOCUMENT_SEMANTIC_TOKENS_FULL: (
        on_semantic_tokens,
        lsp.SemanticTokensLegend(TOKEN_TYPES, [lsp.SemanticTokenModifiers.Definition]),
    ),
}
"""The answer to each request about a document, with the options that the server registers."""
