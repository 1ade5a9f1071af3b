"""`scalec fmt`: rewrites files whole or not at all, each for itself: a plan that is wrong keeps no
other from its layout.
"""

import os
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ...compiler.cli.command import Command, file_path
from ...compiler.cli.output import PLAN_WRONG, UsageError, as_file, cannot_write
from ...compiler.syntax.diagnostics import Diagnostic, PlanError
from ...compiler.syntax.limits import load
from ...compiler.syntax.source import Source
from . import format_plan

STANDARD_INPUT = Path("-")


def fmt(options: Namespace) -> int:
    """`scalec fmt`; returns the exit status."""
    if STANDARD_INPUT in options.files:
        return _standard_input(options)
    wrong: list[Diagnostic] = []
    changed: list[Path] = []
    for path in options.files:
        try:
            if _format(path, options.check):
                changed.append(path)
        except PlanError as error:
            wrong += error.diagnostics
    if wrong:
        raise PlanError(wrong)
    return PLAN_WRONG if options.check and changed else 0


def _format(path: Path, only_check: bool) -> bool:
    """Names a file that changes, rewrites it unless `only_check`; returns whether it changes."""
    text = format_plan(load(path))
    if text.encode() == path.read_bytes():
        return False
    if only_check:
        print(f"would format {path}")
    else:
        _replace(path, text)
        print(f"formatted {path}")
    return True


def _replace(path: Path, text: str) -> None:
    """Replaces a file and keeps its mode; for a link, replaces its target."""
    target = path.resolve()
    draft = target.with_name(f".{target.name}.{os.urandom(4).hex()}")
    try:
        # a file that is not to be written stays, though its folder could be
        target.open("r+b").close()
        with draft.open("xb") as file:
            file.write(text.encode())
        draft.chmod(target.stat().st_mode & 0o7777)
        draft.replace(target)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        draft.unlink(missing_ok=True)


def _standard_input(options: Namespace) -> int:
    if len(options.files) > 1:
        raise UsageError("`-` is standard input and cannot be combined with files")
    content = sys.stdin.buffer.read()
    text = format_plan(_to_source(content))
    if options.check:
        if text.encode() == content:
            return 0
        sys.stdout.write("would format standard input\n")
        return PLAN_WRONG
    as_file()
    sys.stdout.write(text)
    return 0


def _to_source(content: bytes) -> "Source":
    try:
        return Source("standard input", content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        where = f"byte 0x{content[error.start]:02x} on line {line}"
        place = Source("standard input", "").whole()
        raise PlanError(
            [Diagnostic("E0101", f"standard input is not UTF-8: {where}", place)]
        ) from None


def _fmt_arguments(parser: ArgumentParser) -> None:
    help = "a plan (.scale), or `-` to read standard input and write standard output"
    parser.add_argument("files", type=file_path, nargs="+", metavar="FILE", help=help)
    help = "write nothing; name the plans that would change and exit with status 1"
    parser.add_argument("--check", action="store_true", help=help)


COMMAND = Command(
    fmt,
    _fmt_arguments,
    "Formats plans with the indentation, spacing and alignment used in plans/, and names each"
    " file it changed.\n"
    "Words and comments stay as they are, in the same order.  A plan with syntax errors is"
    " left alone.",
    "scalec fmt plans/tiny_llama.scale",
)
