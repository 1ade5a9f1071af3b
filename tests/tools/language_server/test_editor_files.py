"""The files for editors and for Pygments, written from the grammar, colour plans as the grammar
reads them.
"""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lark import Transformer
from pygments.token import Comment, Keyword, Number, String, Token

from scalec.compiler.syntax.lark_parser import parser
from scalec.grammar.pygments_lexer import ScaleLexer

ROOT = Path(__file__).parents[3]
PLANS = [
    *ROOT.glob("plans/**/*.scale"),
    *ROOT.glob("examples/*.scale"),
    *ROOT.glob("docs/tutorial/*.scale"),
]


def test_what_is_generated_is_current() -> None:
    spec = importlib.util.spec_from_file_location(
        "generate", ROOT / "docs" / "editors" / "generate.py"
    )
    assert spec
    assert spec.loader
    generate: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.TEXTMATE.read_text() == generate.textmate(), "run docs/editors/generate.py"
    assert generate.PYGMENTS.read_text() == generate.lexer(), "run docs/editors/generate.py"


def read(text: str) -> Iterator[tuple[str, str]]:
    """The words of a plan and the grammar's names for them, where it reads them."""
    found = parser("plan", Transformer()).parse_interactive(text)
    return ((str(token), token.type) for token in found.iter_parse())


@pytest.mark.parametrize("path", PLANS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_words_have_the_colours_of_what_the_grammar_reads(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    words = [
        (kind, word)
        for kind, word in ScaleLexer().get_tokens(text)
        if kind in Token and word.strip()
    ]
    code = [(kind, word) for kind, word in words if kind not in Comment]
    kinds = {"STRING": String, "NUMBER": Number}
    for (kind, word), (expected, terminal) in zip(code, read(text), strict=True):
        assert word == expected
        is_word = terminal != "NAME" and expected.isalpha()
        assert (kind in Keyword and kind is not Keyword.Type) == is_word, f"{word}: {terminal}"
        assert all((kind in each) == (terminal == name) for name, each in kinds.items()), (
            f"{word}: {terminal}"
        )


def test_the_extension_has_the_files_that_it_names() -> None:
    folder = ROOT / "docs" / "editors" / "vscode"
    package = json.loads((folder / "package.json").read_text())
    (language,), (grammar,) = (
        package["contributes"]["languages"],
        package["contributes"]["grammars"],
    )
    for name in (package["main"], language["configuration"], grammar["path"]):
        assert (folder / name).is_file()
    assert json.loads((folder / grammar["path"]).read_text())["scopeName"] == grammar["scopeName"]
