"""`scalec lsp` as an editor uses it: a client on its standard input and output."""

import asyncio
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lsprotocol import types as lsp
from pygls.lsp.client import LanguageClient

from helpers.launched import HANGS

PLAN = """use "models/tiny.scale" { dims { hidden = 64 } }
mesh  { dp = 2  tp = 2 }
shard { batch over dp  ffn over tp }
train {
  seq = 128  global_batch = 8  microbatch = 4  steps = 20
  optimizer adamw { lr = 1e-3 }
  data text { files = [python_stdlib] }
}
"""
MODEL = Path(__file__).parents[3] / "examples" / "06_mlp.scale"
Run = Callable[[LanguageClient, "asyncio.Queue[Any]", Path], Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A plan, and a model beside it."""
    model = re.search(r"model mlp.*?\n}\n", MODEL.read_text(), re.DOTALL)
    assert model
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.scale").write_text(model[0])
    (tmp_path / "plan.scale").write_text(PLAN)
    return tmp_path


async def _session(folder: Path, run: Run) -> None:
    client, told = LanguageClient("test", "1"), asyncio.Queue[Any]()

    @client.feature(lsp.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)
    def on_diagnostics(it: lsp.PublishDiagnosticsParams) -> None:
        told.put_nowait(it)

    await client.start_io(sys.executable, "-m", "scalec", "lsp")
    folders = [lsp.WorkspaceFolder(folder.as_uri(), "plans")]
    await client.initialize_async(lsp.InitializeParams(lsp.ClientCapabilities(), workspace_folders=folders))
    client.initialized(lsp.InitializedParams())
    await run(client, told, folder)
    await client.shutdown_async(None)
    client.exit(None)
    await client.stop()


async def _typed_and_asked(client: LanguageClient, told: "asyncio.Queue[Any]", folder: Path) -> None:
    plan = lsp.TextDocumentIdentifier((folder / "plan.scale").as_uri())
    client.text_document_did_open(lsp.DidOpenTextDocumentParams(lsp.TextDocumentItem(plan.uri, "scale", 1, PLAN)))
    assert not any([(await told.get()).diagnostics for _ in range(2)]), "after a key stroke, and after a pause"

    at_ffn = lsp.Position(2, PLAN.splitlines()[2].index("ffn") + 1)
    shown = await client.text_document_hover_async(lsp.HoverParams(plan, at_ffn))
    assert shown
    assert isinstance(shown.contents, lsp.MarkupContent)
    assert shown.contents.value.startswith("`ffn` = 256")
    found = await client.text_document_definition_async(lsp.DefinitionParams(plan, at_ffn))
    assert isinstance(found, lsp.Location)
    assert found.uri == (folder / "models" / "tiny.scale").as_uri()

    edit = await client.text_document_rename_async(lsp.RenameParams(plan, at_ffn, "inner"))
    assert edit
    assert edit.changes
    assert {Path(uri).name: len(edits) for uri, edits in edit.changes.items()} == {"plan.scale": 1, "tiny.scale": 3}

    whole = lsp.Range(lsp.Position(0, 0), lsp.Position(99, 0))
    model = lsp.TextDocumentIdentifier((folder / "models" / "tiny.scale").as_uri())
    text = (folder / "models" / "tiny.scale").read_text()
    client.text_document_did_open(lsp.DidOpenTextDocumentParams(lsp.TextDocumentItem(model.uri, "scale", 1, text)))
    assert not (await told.get()).diagnostics, "a model by itself is no mistake"
    hints = await client.text_document_inlay_hint_async(lsp.InlayHintParams(model, whole))
    assert hints
    assert any("all_reduce tp" in str(hint.label) for hint in hints), "as in the plan that uses it"


def test_an_editor_is_told_what_it_asks(folder: Path) -> None:
    asyncio.run(asyncio.wait_for(_session(folder, _typed_and_asked), HANGS))
