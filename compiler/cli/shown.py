"""Reports on standard output: on a terminal with headings, numbers and places set apart, elsewhere as they are."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

STYLES = (
    r"(?<![\w.:])(?P<cyan>\d[\d,.]*(?: ?(?:%|[KMGTP]i?B|B|[mµ]?s|GPUs?|ranks?|nodes?)\b)?)",
    r"(?P<magenta>\b[\w-]+\.(?:scale|ir|py|json|csv|toml)(?::\d+)?\b)",
    r"`(?P<bold>[^`\n]+)`",
    r"(?m)^(?P<green>ok|equal|fits|verified)\b",
    r"(?m)^(?P<red>does not fit|not verified|differs?|fail)\b",
    r"(?m)^(?P<yellow>warn)\b",
    r"(?:\A|\n\n)(?P<bold>[^\n]*\S {2,}\S[^\n]*)(?=\n\S)",  # the head of a table: columns, above another line
)
"""Words that are set apart, by the name of the style; later ones add to earlier ones."""


def show(text: str) -> None:
    """Prints a report, which ends without a line break."""
    from ..syntax.diagnostics import wants_colour

    if not wants_colour(sys.stdout):
        print(text)
        return
    from rich.console import Console

    Console(file=sys.stdout, highlight=False).print(styled(text), soft_wrap=True)


def styled(text: str) -> "Text":
    """The same text with styles."""
    from rich.text import Text

    found = Text(text)
    for pattern in STYLES:
        found.highlight_regex(pattern)
    return found
