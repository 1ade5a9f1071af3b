"""Reports and diagnostics on the standard streams: for people, on a terminal with styles, or in a form for machines."""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .streams import as_file

if TYPE_CHECKING:
    from rich.text import Text

    from ..syntax.diagnostics import Diagnostic

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


TEXT = "text"
"""The form for people."""


def format_argument(parser: ArgumentParser) -> None:
    """The option of commands whose diagnostics can have another form."""
    help = "the form of errors and warnings; one for machines is all that is printed (default: text)"
    parser.add_argument("--format", choices=(TEXT, "json", "sarif", "github"), default=TEXT, help=help)


def tell(found: "Sequence[Diagnostic]", form: str = TEXT) -> None:
    """Prints diagnostics: for people on standard error, for machines on standard output."""
    if form == TEXT:
        from ..syntax.diagnostics import render, wants_colour

        colour = wants_colour(sys.stderr)
        sys.stderr.write("".join(f"{render(each, colour=colour)}\n\n" for each in found))
        return
    from ..reports.diagnostic_formats import FORMATS

    as_file()
    sys.stdout.write(FORMATS[form](found))
