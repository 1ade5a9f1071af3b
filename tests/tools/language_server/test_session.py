"""`scalec lsp` as an editor uses it: a client on its standard input and output."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcException
from pygls.lsp.client import LanguageClient

from helpers.launched import HANGS
from scalec.compiler import cli

PLAN = """use "models/tiny.scale" { dims { hidden = 64 } }
mesh  { dp = 2  tp = 2 }
shard { batch over dp  ffn over tp }
train {
  seq = 128  global_batch = 8  microbatch = 4  steps = 20
  optimizer adamw { lr = 1e-3 }
  data text       { files = [python_stdlib] }
}
"""
MODEL = Path(__file__).parents[3] / "examples" / "06_mlp.scale"
COMPILED = "compiled"
"""Among what the client is told: the step was compiled after a pause."""

Run = Callable[[LanguageClient, "asyncio.Queue[Any]", Path], Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A plan, and a model beside it."""
    model = re.search(r"model mlp.*?\n}\n", MODEL.read_text(), re.DOTALL)
    assert model
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.scale").write_text(model[0])
    (tmp_path / "plan.scale").write_text(PLAN)
    (tmp_path / "other.scale").write_text(PLAN)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "third.scale").write_text(PLAN.replace("models", "../models"))
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "plan.scale").write_text(PLAN.replace("models", "../models"))
    return tmp_path


async def _session(folder: Path, run: Run) -> None:
    client, told = LanguageClient("test", "1"), asyncio.Queue[Any]()

    @client.feature(lsp.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)
    def on_diagnostics(it: lsp.PublishDiagnosticsParams) -> None:
        told.put_nowait(it)

    @client.feature(lsp.WORKSPACE_INLAY_HINT_REFRESH)
    def on_refresh(_: None) -> None:
        told.put_nowait(COMPILED)

    await client.start_io(sys.executable, "-m", "scalec", "lsp")
    folders = [lsp.WorkspaceFolder(folder.as_uri(), "plans")]
    able = lsp.ClientCapabilities(
        lsp.WorkspaceClientCapabilities(
            inlay_hint=lsp.InlayHintWorkspaceClientCapabilities(refresh_support=True)
        ),
        lsp.TextDocumentClientCapabilities(
            rename=lsp.RenameClientCapabilities(prepare_support=True)
        ),
        general=lsp.GeneralClientCapabilities(position_encodings=[lsp.PositionEncodingKind.Utf8]),
    )
    told_back = await client.initialize_async(lsp.InitializeParams(able, workspace_folders=folders))
    assert told_back.capabilities.position_encoding == lsp.PositionEncodingKind.Utf8
    client.initialized(lsp.InitializedParams())
    await run(client, told, folder)
    await client.shutdown_async(None)
    client.exit(None)
    await client.stop()
    assert client.stopped


async def _opened(
    client: LanguageClient, told: "asyncio.Queue[Any]", path: Path, compiled: int = 1
) -> lsp.TextDocumentIdentifier:
    """Opens a file, in which nothing is wrong, as is told once; so many plans are compiled."""
    item = lsp.TextDocumentItem(path.as_uri(), "scale", 1, path.read_text())
    client.text_document_did_open(lsp.DidOpenTextDocumentParams(item))
    assert await told.get() == lsp.PublishDiagnosticsParams(item.uri, (), 1)
    assert [await told.get() for _ in range(compiled)] == [COMPILED] * compiled
    return lsp.TextDocumentIdentifier(item.uri)


def _typed(
    client: LanguageClient, plan: lsp.TextDocumentIdentifier, version: int, text: str
) -> None:
    """Has the client type a text."""
    document = lsp.VersionedTextDocumentIdentifier(version, plan.uri)
    client.text_document_did_change(lsp.DidChangeTextDocumentParams(document, [_whole(text)]))


def _whole(text: str) -> lsp.TextDocumentContentChangeWholeDocument:
    return lsp.TextDocumentContentChangeWholeDocument(text)


async def _typed_and_asked(
    client: LanguageClient, told: "asyncio.Queue[Any]", folder: Path
) -> None:
    plan = await _opened(client, told, folder / "plan.scale")

    at_ffn = lsp.Position(2, PLAN.splitlines()[2].index("ffn") + 1)
    shown = await client.text_document_hover_async(lsp.HoverParams(plan, at_ffn))
    assert shown
    assert isinstance(shown.contents, lsp.MarkupContent)
    assert shown.contents.value.startswith("`ffn` = 256")
    found = await client.text_document_definition_async(lsp.DefinitionParams(plan, at_ffn))
    assert isinstance(found, lsp.Location)
    assert found.uri == (folder / "models" / "tiny.scale").as_uri()

    renamed = await client.text_document_prepare_rename_async(lsp.PrepareRenameParams(plan, at_ffn))
    assert renamed == lsp.Range(
        lsp.Position(2, at_ffn.character - 1), lsp.Position(2, at_ffn.character + 2)
    )
    with pytest.raises(JsonRpcException, match="`batch` is a word of the language"):
        await client.text_document_prepare_rename_async(
            lsp.PrepareRenameParams(plan, lsp.Position(2, 9))
        )
    edit = await client.text_document_rename_async(lsp.RenameParams(plan, at_ffn, "inner"))
    assert edit
    assert edit.changes
    counts = {Path(uri).name: len(edits) for uri, edits in edit.changes.items()}
    assert counts == {"plan.scale": 1, "tiny.scale": 3, "other.scale": 1, "third.scale": 1}, (
        "in all that share it"
    )
    with pytest.raises(JsonRpcException, match="`hidden` is the name of another dim"):
        await client.text_document_rename_async(lsp.RenameParams(plan, at_ffn, "hidden"))

    model = await _opened(client, told, folder / "models" / "tiny.scale", 2)
    whole = lsp.Range(lsp.Position(0, 0), lsp.Position(99, 0))
    hints = await client.text_document_inlay_hint_async(lsp.InlayHintParams(model, whole))
    assert hints
    assert any("all_reduce tp" in str(hint.label) for hint in hints), "as in the plan that uses it"
    symbols = await client.text_document_document_symbol_async(lsp.DocumentSymbolParams(model))
    assert symbols
    assert [it.kind for it in symbols] == [lsp.SymbolKind.Class]
    folds = await client.text_document_folding_range_async(lsp.FoldingRangeParams(model))
    assert folds
    text = (folder / "models" / "tiny.scale").read_text().split("\n")
    assert {text[fold.end_line].strip() for fold in folds} == {"}"}
    line = next(at for at, words in enumerate(text) if "silu" in words)
    help = await client.text_document_signature_help_async(
        lsp.SignatureHelpParams(model, lsp.Position(line, text[line].index("norm[")))
    )
    assert help
    assert (help.signatures[0].label, help.active_parameter) == ("rmsnorm(x, weight, eps)", 1)
    lines = await client.text_document_implementation_async(
        lsp.ImplementationParams(model, lsp.Position(line, 8))
    )
    assert isinstance(lines, list)
    places = [each for each in lines if isinstance(each, lsp.Location)]
    program = Path(places[0].uri.removeprefix("file://")).read_text().split("\n")
    assert any("silu" in program[each.range.start.line] for each in places)


async def _mended(client: LanguageClient, told: "asyncio.Queue[Any]", folder: Path) -> None:
    plan = await _opened(client, told, folder / "plan.scale")
    broken = PLAN.replace("[python_stdlib]", '["\U0001f600.txt"]  holdout = 5%').replace(
        "steps", "max_steps"
    )
    _typed(client, plan, 2, broken)
    found = await told.get()
    assert (found.uri, found.version) == (plan.uri, 2)
    (mistake,) = found.diagnostics
    assert (mistake.code, mistake.range.start.line) == ("E0401", 4)
    assert await told.get() == COMPILED
    row = next(at for at, text in enumerate(broken.split("\n")) if "holdout" in text)
    column = len(broken.split("\n")[row].split("holdout")[0].encode())
    shown = await client.text_document_hover_async(lsp.HoverParams(plan, lsp.Position(row, column)))
    assert shown
    assert shown.range == lsp.Range(
        lsp.Position(row, column), lsp.Position(row, column + len("holdout"))
    )

    asked = lsp.CodeActionParams(plan, mistake.range, lsp.CodeActionContext([mistake]))
    actions = await client.text_document_code_action_async(asked)
    assert actions
    (action,) = actions
    assert action.title == "write `steps`"
    words = lsp.CompletionParams(plan, lsp.Position(2, len("shard { batch over ")))
    items = await client.text_document_completion_async(words)
    assert isinstance(items, list)
    assert {item.label for item in items} == {"dp", "tp"}

    _typed(client, plan, 3, PLAN.replace("  {", "{"))
    assert await told.get() == lsp.PublishDiagnosticsParams(plan.uri, (), 3)
    options = lsp.DocumentFormattingParams(plan, lsp.FormattingOptions(2, insert_spaces=True))
    laid = await client.text_document_formatting_async(options)
    assert laid
    assert [edit.new_text for edit in laid] == [PLAN]
    tokens = await client.text_document_semantic_tokens_full_async(lsp.SemanticTokensParams(plan))
    assert tokens
    assert len(tokens.data) % 5 == 0
    client.text_document_did_close(lsp.DidCloseTextDocumentParams(plan))
    assert await client.text_document_hover_async(lsp.HoverParams(plan, lsp.Position(0, 0))) is None


async def _told_once(client: LanguageClient, told: "asyncio.Queue[Any]", folder: Path) -> None:
    """Nothing is told that the editor knows; all by the name that it has for a file, here one
    by way of a link.
    """
    (folder / "link").symlink_to(folder)
    plan = await _opened(client, told, folder / "link" / "plan.scale")
    _typed(client, plan, 2, PLAN.replace("steps", "max_steps"))
    first = await told.get()
    assert [it.code for it in first.diagnostics] == ["E0401"]
    assert await told.get() == COMPILED
    _typed(client, plan, 3, PLAN.replace("steps", "max_steps") + "# a comment\n")
    assert await told.get() == COMPILED, "the same mistake is not told a second time"
    _typed(client, plan, 4, PLAN.replace("batch over dp", "batch over dp  seq over dp"))
    second = await told.get()
    assert (second.uri, second.version, [it.code for it in second.diagnostics]) == (plan.uri, 4, [])
    third = await told.get()
    assert (third.uri, third.version, [it.code for it in third.diagnostics]) == (
        plan.uri,
        4,
        ["E0508"],
    )
    assert await told.get() == COMPILED

    model = await _opened(client, told, folder / "models" / "tiny.scale", 2)
    _typed(
        client,
        model,
        2,
        (folder / "models" / "tiny.scale").read_text().replace("ffn = 256", "ffn = 255"),
    )
    assert "E0510" in [it.code for it in (await told.get()).diagnostics], "in the plan that uses it"
    assert [await told.get() for _ in range(2)] == [COMPILED] * 2
    client.text_document_did_close(lsp.DidCloseTextDocumentParams(model))
    assert "E0510" not in [it.code for it in (await told.get()).diagnostics], (
        "the file on disk is right"
    )


@pytest.mark.parametrize("run", [_typed_and_asked, _mended, _told_once])
def test_an_editor_is_told_what_it_asks(folder: Path, run: Run) -> None:
    asyncio.run(asyncio.wait_for(_session(folder, run), HANGS))


def _framed(method: str, **more: Any) -> bytes:
    content = json.dumps({"jsonrpc": "2.0", "method": method, **more}).encode()
    return b"Content-Length: %d\r\n\r\n%s" % (len(content), content)


def test_it_ends_as_it_is_told_to_and_prints_nothing_else() -> None:
    asked = [
        _framed(
            "initialize", id=1, params={"processId": None, "rootUri": None, "capabilities": {}}
        ),
        _framed("initialized", params={}),
        _framed("no/such/method", id=2, params={}),
        _framed("shutdown", id=3),
        _framed("exit"),
    ]
    command = [sys.executable, "-m", "scalec", "lsp"]
    ended = subprocess.run(
        command, check=False, input=b"".join(asked), capture_output=True, timeout=HANGS
    )
    assert ended.returncode == 0
    assert b"Traceback" not in ended.stderr
    answers = re.split(rb"Content-Length: \d+\r\n(?:[^\r]+\r\n)*\r\n", ended.stdout)[1:]
    assert [json.loads(answer).get("id") for answer in answers if b'"id"' in answer] == [1, 2, 3]


def test_without_pygls_the_command_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for name in [*sys.modules]:
        if name.startswith(
            (
                "pygls",
                "lsprotocol",
                "scalec.tools.language_server.server",
                "scalec.tools.language_server.wire",
            )
        ):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pygls", None)
    monkeypatch.setitem(sys.modules, "lsprotocol", None)
    assert cli.main(["lsp"]) == 2
    assert "pip install 'scalec[lsp]'" in capsys.readouterr().err
