"""The extension for VS Code: its grammar in VS Code's own engine, its package, and a session of
its client.
"""

import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from subprocess import run

import pytest
from pygments.token import Token

from helpers.edited_plan import write_plan
from helpers.launched import HANGS
from helpers.node import NODE, install, modules, node
from scalec.grammar.pygments_lexer import ScaleLexer

ROOT = Path(__file__).parents[3]
EXTENSION = ROOT / "docs" / "editors" / "vscode"
GRAMMAR = EXTENSION / "syntaxes" / "scale.tmLanguage.json"
HELPERS = ROOT / "tests" / "helpers"
PLANS = [
    *ROOT.glob("plans/**/*.scale"),
    *ROOT.glob("examples/*.scale"),
    *ROOT.glob("docs/tutorial/*.scale"),
]
SCOPES = {
    "comment.line.number-sign": Token.Comment.Single,
    "string.quoted.double": Token.String,
    "constant.numeric": Token.Number,
    "keyword.control": Token.Keyword,
    "storage.type": Token.Keyword.Type,
    "variable.other.property": Token.Name.Attribute,
    "entity.name.function": Token.Name.Function,
    "variable.parameter": Token.Name.Variable,
    "variable.other": Token.Name,
    "keyword.operator": Token.Operator,
    "punctuation": Token.Punctuation,
}
"""Scopes of TextMate by Pygments' kinds of the same words."""

pytestmark = pytest.mark.long


def test_words_have_the_scopes_of_pygments_kinds() -> None:
    """The same rules give the same words in VS Code's engine, in all plans."""
    for path, words in zip(
        PLANS, node(HELPERS / "textmate_tokens.cjs", str(GRAMMAR), *map(str, PLANS)), strict=True
    ):
        found = (
            (word.strip(), kind) for kind, word in ScaleLexer().get_tokens(path.read_text("utf-8"))
        )
        expected = [(word, kind) for word, kind in found if word]
        assert [
            (word.strip(), SCOPES[scope.removesuffix(".scale")]) for word, scope in words
        ] == expected, path


def test_the_scopes_of_a_plan(golden: Callable[[str, str], None]) -> None:
    (words,) = node(
        HELPERS / "textmate_tokens.cjs", str(GRAMMAR), str(ROOT / "examples" / "06_mlp.scale")
    )
    golden("lsp/textmate.txt", "".join(f"{scope:32} {word}\n" for word, scope in words))


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The extension out of its package, as the page says to make it."""
    folder = tmp_path_factory.mktemp("vscode")
    shutil.copytree(EXTENSION, folder / "own")
    vsce = modules() / ".bin" / "vsce"
    if install(folder / "own"):
        pytest.skip("npm cannot install what the extension needs")
    line = [
        str(vsce),
        "package",
        "--allow-missing-repository",
        "--skip-license",
        "-o",
        str(folder / "own.vsix"),
    ]
    ended = run(
        line, check=False, cwd=folder / "own", capture_output=True, text=True, timeout=HANGS
    )
    assert ended.returncode == 0, ended.stderr
    assert "ERROR" not in ended.stderr
    with zipfile.ZipFile(folder / "own.vsix") as package:
        package.extractall(folder / "out")
    return folder / "out" / "extension"


def test_the_package_has_all_that_it_needs(packaged: Path) -> None:
    for path in EXTENSION.rglob("*"):
        assert (packaged / path.relative_to(EXTENSION)).exists(), path
    assert NODE
    resolved = run(
        [NODE, "-p", "require.resolve('vscode-languageclient/node')"],
        check=True, cwd=packaged, capture_output=True, text=True, timeout=HANGS,
    )  # fmt: skip
    assert Path(resolved.stdout.strip()).is_relative_to(packaged)


def test_the_client_edits_a_plan(
    packaged: Path, tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    """It finds the program in the folder's `.venv`; columns count in UTF-16."""
    write_plan(tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "scalec").symlink_to(Path(sys.executable).parent / "scalec")
    seen = node(HELPERS / "vscode_session.cjs", str(packaged / "extension.js"), str(tmp_path))
    golden("lsp/vscode.txt", "".join(f"{what}: {value}\n" for what, value in seen))
