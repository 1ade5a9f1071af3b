"""The command `diff`: two plans side by side."""

from argparse import Namespace

from .compile import load

DIFFERENT = 1
"""The exit status where plans differ."""


def diff(options: Namespace) -> int:
    """`scalec diff`; returns the exit status."""
    import json

    from ..analysis.time.expected import expected
    from ..reports.diff import as_json, figures, rows, text

    programs = [load(path).program for path in options.plans]
    found = [*rows(*(figures(program, expected(program)) for program in programs))]
    different = [row for row in found if row.differs]
    shown = found if options.all else different
    print(json.dumps(as_json(shown), indent=2) if options.json else text(programs, shown))
    return DIFFERENT if different else 0
