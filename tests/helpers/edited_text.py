"""Texts with a stretch replaced."""

from collections.abc import Iterable

from scalec.compiler.syntax.source import Span


def replaced(text: str, spans: Iterable[Span], new: str) -> str:
    """A text with the same words in the place of spans, each of which is on one line."""
    lines = text.split("\n")
    for span in sorted(spans, key=lambda it: (it.line, -it.column)):
        line = lines[span.line - 1]
        lines[span.line - 1] = line[: span.column - 1] + new + line[span.end_column - 1 :]
    return "\n".join(lines)
