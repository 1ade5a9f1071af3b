"""`.venv/bin/python docs/editors/generate.py`: writes the rules of colours of plans, from the
terminals of the grammar.

The TextMate grammar of the VS Code extension and the Pygments lexer have the same rules in the same
order.  Words of the language are names where none of its items can begin; the rules tell by what
follows on the line.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from lark import Transformer

from scalec.compiler.syntax.lark_parser import parser

ROOT = Path(__file__).parents[2]
TEXTMATE = ROOT / "docs" / "editors" / "vscode" / "syntaxes" / "scale.tmLanguage.json"
PYGMENTS = ROOT / "grammar" / "pygments_lexer.py"

SCOPES = {
    "COMMENT": ("comment.line.number-sign", "Comment.Single"),
    "STRING": ("string.quoted.double", "String"),
    "NUMBER": ("constant.numeric", "Number"),
    "word": ("keyword.control", "Keyword"),
    "section": ("storage.type", "Keyword.Type"),
    "key": ("variable.other.property", "Name.Attribute"),
    "call": ("entity.name.function", "Name.Function"),
    "parameter": ("variable.parameter", "Name.Variable"),
    "NAME": ("variable.other", "Name"),
    "operator": ("keyword.operator", "Operator"),
    "bracket": ("punctuation", "Punctuation"),
}
"""The names by which editors and Pygments choose colours: of terminals, and of names by what
follows them.
"""

LEXER = '''"""A Pygments lexer of plans; docs/editors/generate.py writes it from the grammar."""

# ruff: noqa: E501
# fmt: off

from typing import Any, ClassVar

from pygments.lexer import RegexLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, Punctuation, String, Whitespace


class ScaleLexer(RegexLexer):
    """Plans as pygmentize, rich and sites show them."""

    name = "scale"
    aliases: ClassVar[list[str]] = ["scale"]
    filenames: ClassVar[list[str]] = ["*.scale"]
    tokens: ClassVar[dict[str, Any]] = {{
        "root": [
            (r"\\s+", Whitespace),
{rules}
        ]
    }}
'''


def rules() -> Iterator[tuple[str, str]]:
    """The kind of each word and its pattern, in the order in which they are tried."""
    terminals = {it.name: it.pattern for it in parser("plan", Transformer()).terminals}
    patterns = {
        name: re.escape(it.value) if it.type == "str" else it.value
        for name, it in terminals.items()
    }
    patterns = {name: pattern.replace("\n", "\\n") for name, pattern in patterns.items()}
    name = patterns.pop("NAME")
    for kind in ("COMMENT", "STRING", "NUMBER"):
        yield kind, patterns.pop(kind)
    starts = (re.match(r"\(?([a-z_|]+)", pattern) for pattern in patterns.values())
    words = {word for start in starts if start for word in start[1].split("|")}
    yield "key", rf"(?:{name})(?=[ \t]*=)"
    yield "word", rf"\b(?:{'|'.join(sorted(words))})\b" + r'(?=[ \t]+["\w.]|[ \t]*[~{]|[ \t]*$)'
    yield "section", rf"(?<!< )(?:{name})(?=(?:[ \t]+\w+)?[ \t]*\{{)"
    yield "call", rf"(?:{name})(?=\()"
    yield "parameter", rf"(?:{name})(?=\[)"
    yield "NAME", name
    signs = sorted(
        (it for it in patterns.values() if re.fullmatch(r"(?:\\?[^\w\s\\])+", it)),
        key=len,
        reverse=True,
    )
    yield "operator", "|".join(it for it in signs if it[-1] not in "()[]{},")
    yield "bracket", "|".join(it for it in signs if it[-1] in "()[]{},")


def textmate() -> str:
    """The TextMate grammar, as JSON."""
    patterns = [{"match": pattern, "name": f"{SCOPES[kind][0]}.scale"} for kind, pattern in rules()]
    grammar = {
        "name": "scale",
        "scopeName": "source.scale",
        "fileTypes": ["scale"],
        "patterns": patterns,
    }
    return f"{json.dumps(grammar, indent=2)}\n"


def lexer() -> str:
    """The module of the Pygments lexer."""
    return LEXER.format(
        rules="\n".join(
            f"            ({_raw(pattern)}, {SCOPES[kind][1]})," for kind, pattern in rules()
        )
    )


def _raw(pattern: str) -> str:
    """A pattern as a raw string."""
    quote = "'" if '"' in pattern else '"'
    return f"r{quote}{pattern}{quote}"


def main() -> None:
    """Writes both files."""
    TEXTMATE.write_text(textmate(), encoding="utf-8")
    PYGMENTS.write_text(lexer(), encoding="utf-8")


if __name__ == "__main__":
    main()
