"""Diagnostics on the standard streams: for people, or in a form for machines."""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .streams import as_file

if TYPE_CHECKING:
    from ..syntax.diagnostics import Diagnostic

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
