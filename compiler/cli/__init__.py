"""The command line: `scalec compile | run | ir | check | explain | diff | plan | calibrate | …`;
`commands.COMMANDS` has all.

Made with argparse, which loads in 3 ms.  A command's module is imported when it is called, so that
`--help` is quick.
"""

import atexit
import gc
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .arguments import options
from .output import (
    BROKEN_PIPE,
    BUG,
    INTERRUPTED,
    PLAN_WRONG,
    TEXT,
    USAGE,
    UsageError,
    abandon,
    streams,
    tell,
)

if TYPE_CHECKING:
    from ..syntax.diagnostics import Diagnostic, PlanError
    from ..syntax.source import Source


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, by default with the arguments of this process; returns the exit status."""
    try:
        with streams():
            return _status(list(sys.argv[1:] if arguments is None else arguments))
    except BrokenPipeError:
        abandon()
        return BROKEN_PIPE


def _status(words: list[str]) -> int:
    arguments = options(words)
    form = vars(arguments).get("format", TEXT)
    # a command makes trees and few cycles: looking for cycles takes a twentieth of its time
    gc.set_threshold(500_000)
    atexit.register(gc.freeze)  # looking for them at the end, when all is still there, a tenth
    from ..syntax.diagnostics import PlanError

    try:
        status: int | None = arguments.command.does(arguments)
        return status or 0
    except PlanError as error:
        return _plan_wrong(error, form)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as error:
        from .compile import ir_text

        edited = ir_text(arguments)
        if edited:
            return _plan_wrong(PlanError([_no_program(edited, error)]), form)
        return _bug(error)


def _plan_wrong(error: "PlanError", form: str) -> int:
    from ..syntax.diagnostics import render, wants_colour

    if form != TEXT:
        tell(error.diagnostics, form)
        return PLAN_WRONG
    colour = wants_colour(sys.stderr)
    texts = [render(diagnostic, colour=colour) for diagnostic in error.diagnostics]
    print("\n\n".join(texts), file=sys.stderr)
    return PLAN_WRONG


def _no_program(source: "Source", error: Exception) -> "Diagnostic":
    """An error in IR that a person wrote: reading does not check all that passes rely on."""
    from ..syntax.diagnostics import Diagnostic, Note

    notes = (Note(None, f"{_culprit(error)}: {_error_text(error)}"),)
    help = (
        "check the edited lines; if unedited output of `scalec ir` gives this error, it is a"
        " bug in scalec"
    )
    return Diagnostic(
        "E0706", "this IR text makes no program", source.whole(), notes=notes, help=help
    )


def _bug(error: Exception) -> int:
    import traceback

    traceback.print_exception(error)
    print(f"\nthis is a bug in scalec, in {_culprit(error)}: {_error_text(error)}", file=sys.stderr)
    return BUG


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _culprit(error: Exception) -> str:
    """The pass that raised an error, or else the module."""
    from traceback import walk_tb

    prefix = f"{__name__.rpartition('.')[0]}."
    ours = list[str]()
    for frame, _ in walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(prefix):
            ours.append(module.removeprefix(prefix))
    passes = list[str]()
    for name in ours:
        for folder in ("passes.", "tuning.decisions."):
            if name.startswith(folder):
                passes.append(name.removeprefix(folder).partition(".")[0])
    return f"pass `{passes[-1]}`" if passes else f"module `{ours[-1]}`"
