"""The commands on texts of plans: `fmt` and `import`.

`fmt` rewrites files whole or not at all, each for itself: where one plan is wrong, the others get
their layout."""

import os
import re
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ...compiler.cli.command import Command, file_path
from ...compiler.cli.output import PLAN_WRONG, UsageError, as_file, cannot_write

if TYPE_CHECKING:
    from ...compiler.syntax.diagnostics import Diagnostic
    from ...compiler.syntax.source import Source


STANDARD_INPUT = Path("-")


def fmt(options: Namespace) -> int:
    """`scalec fmt`; returns the exit status."""
    from ...compiler.syntax.diagnostics import PlanError

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
    from . import format_plan
    from ...compiler.syntax.limits import load

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
    from . import format_plan

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
    from ...compiler.syntax.diagnostics import Diagnostic, PlanError
    from ...compiler.syntax.source import Source

    try:
        return Source("standard input", content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        where = f"byte 0x{content[error.start]:02x} on line {line}"
        place = Source("standard input", "").whole()
        raise PlanError(
            [Diagnostic("E0101", f"standard input is not UTF-8: {where}", place)]
        ) from None


def import_(options: Namespace) -> None:
    """`scalec import`."""
    from ..importer import import_config
    from ...compiler.syntax.limits import load

    if not options.config.exists() and (name := _hub_name(options.config)):
        download = f"hf download {name} config.json --local-dir FOLDER"
        raise UsageError(
            f"`{name}` is not a file: `{download}` gets the file, then import FOLDER/config.json"
        )
    text = import_config(load(options.config))
    if options.output is None:
        as_file()
        sys.stdout.write(text)
        return
    try:
        with options.output.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise cannot_write(options.output, error, "; choose another file with -o") from error
    print(f"wrote {options.output}; the mesh and how it trains are yours to set")


_HUB = re.compile(r"(?:https?:/+huggingface\.co/)?(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)")
"""A model on Hugging Face's hub, as people write it; a path has lost one of the slashes."""


def _hub_name(path: Path) -> str:
    """The name of a model on the hub, `meta-llama/Llama-3.1-8B`; "" where the path looks like a
    file.
    """
    match = _HUB.fullmatch(str(path))
    if not match or path.suffix == ".json":
        return ""
    return match["name"]


def _fmt_arguments(parser: ArgumentParser) -> None:
    help = "a plan (.scale), or `-` to read standard input and write standard output"
    parser.add_argument("files", type=file_path, nargs="+", metavar="FILE", help=help)
    help = "write nothing; name the plans that would change and exit with status 1"
    parser.add_argument("--check", action="store_true", help=help)


FORMAT = Command(
    "fmt",
    fmt,
    _fmt_arguments,
    "format plans",
    "Formats plans with the indentation, spacing and alignment used in plans/, and names each"
    " file it changed.\n"
    "Words and comments stay as they are, in the same order.  A plan with syntax errors is"
    " left alone.",
    "scalec fmt plans/tiny_llama.scale",
)


def _import_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "config", type=file_path, metavar="CONFIG", help="the config.json of a model"
    )
    help = "the plan to write (default: standard output)"
    parser.add_argument("-o", "--output", type=file_path, metavar="FILE", help=help)


IMPORT = Command(
    "import",
    import_,
    _import_arguments,
    "write a plan for a Hugging Face model",
    "Writes a plan for the model of a config.json, or names the fields that no plan can"
    " express.  To start\n"
    "training from the model's weights, run `train.py --init FOLDER`.",
    "scalec import config.json -o plan.scale",
)
