"""Texts with other words in some places."""

from collections.abc import Iterable, Mapping

from scalec.compiler.syntax.source import Span


def replaced(text: str, spans: Iterable[Span], new: str) -> str:
    """A text with the same words in the place of spans, each of which is on one line."""
    lines = text.split("\n")
    for span in sorted(spans, key=lambda it: (it.line, -it.column)):
        line = lines[span.line - 1]
        lines[span.line - 1] = line[: span.column - 1] + new + line[span.end_column - 1 :]
    return "\n".join(lines)


def replace_once(text: str, edits: Mapping[str, str]) -> str:
    """A text with the first of each old piece, which must be in it, replaced by the new one."""
    for old, new in edits.items():
        assert old in text, f"`{old}` is not in the text"
        text = text.replace(old, new, 1)
    return text


def replace_all(text: str, *pieces: str) -> str:
    """A text with all of each old piece, which must be in it, replaced; `pieces` are old, new, old,
    new, …
    """
    for old, new in zip(pieces[::2], pieces[1::2], strict=True):
        assert old in text, f"`{old}` is not in the text"
        text = text.replace(old, new)
    return text
