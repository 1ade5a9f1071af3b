"""A Pygments lexer of plans; docs/editors/generate.py writes it from the grammar."""

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
    tokens: ClassVar[dict[str, Any]] = {
        "root": [
            (r"\s+", Whitespace),
            (r"#[^\n]*", Comment.Single),
            (r'"([^"\\\n]|\\[^\n])*"', String),
            (r"(?!1[fF]1[bB]\b)[0-9][0-9_]*(\.[0-9][0-9_]*)?([eE][+\-]?[0-9]+)?(%|[A-Za-z]+)?", Number),
            (r"(?:[A-Za-z_][A-Za-z0-9_]*|1[fF]1[bB]\b)(?=[ \t]*=)", Name.Attribute),
            (r'\b(?:as|bidirectional|by|causal|cross_document|deterministic|else|every|from|if|init|linear|model|op|over|pad|repeat|route|to|use|via|zero)\b(?=[ \t]+["\w.]|[ \t]*[~{]|[ \t]*$)', Keyword),
            (r"(?<!< )(?:[A-Za-z_][A-Za-z0-9_]*|1[fF]1[bB]\b)(?=(?:[ \t]+\w+)?[ \t]*\{)", Keyword.Type),
            (r"(?:[A-Za-z_][A-Za-z0-9_]*|1[fF]1[bB]\b)(?=\()", Name.Function),
            (r"(?:[A-Za-z_][A-Za-z0-9_]*|1[fF]1[bB]\b)(?=\[)", Name.Variable),
            (r"[A-Za-z_][A-Za-z0-9_]*|1[fF]1[bB]\b", Name),
            (r"\.\.|\->|\+|\-|\*|\~|/|@|=|<", Operator),
            (r"\(|\)|\[|\]|\{|\}|,", Punctuation),
        ]
    }
