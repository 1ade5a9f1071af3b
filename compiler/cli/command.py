"""A command of the command line, and arguments that several have."""

import os
import signal
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from .output import UsageError

PLAN = (
    "a plan (.scale), one that comes with scalec (scalec:NAME), or IR text that `scalec ir` printed"
)


class Command(NamedTuple):
    """A command: its function, its arguments, its help in full, and an example."""

    does: Callable[[Namespace], int | None]
    arguments: Callable[[ArgumentParser], None]
    text: str
    example: str
    passes_on: bool = False
    """Whether words after `--` go to train.py."""


def need(package: str, what: str) -> None:
    """UsageError where a package is not installed: the compiler itself imports neither torch
    nor packages that come with it.
    """
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise UsageError(f"{package} is not installed for {sys.executable}; {what} needs it")


def torchrun(words: Sequence[str], ranks: int) -> NoReturn:
    """Starts torchrun in place of this process, which shares its cores among the ranks.

    It takes Ctrl-C when it has imported torch (`runtime/config/interrupts.py`).
    """
    sys.stdout.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    os.execv(sys.executable, [sys.executable, "-m", "scalec.runtime.train.torchrun", *words])


def file_path(text: str) -> Path:
    """A path on the command line."""
    if not text:
        raise ArgumentTypeError("it is empty: name a file or a folder")
    if max(map(len, text.encode(errors="surrogateescape").split(b"/"))) > 255:
        raise ArgumentTypeError("it has a name of more than 255 bytes, which no file has")
    return Path(text)


def plan_path(text: str) -> Path:
    """The path of a plan on the command line; `scalec:llama3_8b` is a plan that comes with
    scalec.
    """
    from ..syntax.package_data import SHIPPED, package_file, package_files

    if not text.startswith(SHIPPED):
        return file_path(text)
    path = package_file(text)
    if path is None:
        from ..syntax.diagnostics import did_you_mean

        near = did_you_mean(text, (name.removesuffix(".scale") for name in package_files()))
        raise ArgumentTypeError(
            f"`{text}` does not come with scalec: {near or '`scalec plans` lists what does'}"
        )
    return path


def count(text: str) -> int:
    """A whole number above 0 on the command line."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ArgumentTypeError(f"`{text}` is not a whole number above 0")
    return int(text)


def plan_argument(parser: ArgumentParser) -> None:
    """The plan of a command that takes one."""
    parser.add_argument("plan", type=plan_path, metavar="PLAN", help=PLAN)


def output_arguments(parser: ArgumentParser) -> None:
    """The options of a command that compiles into a folder."""
    help = "the folder to write to (default: out/ and the plan's name)"
    parser.add_argument("-o", "--output", type=file_path, metavar="DIR", help=help)
    verify_arguments(parser, "the written files")
    try_argument(parser)


def verify_arguments(parser: ArgumentParser, place: str) -> None:
    """The options about the proof; a command that skips it says so in `place`."""
    help = f"skip the proof, and say so in {place}"
    parser.add_argument("--no-verify", dest="verify", action="store_false", help=help)
    help = "evaluate the proof although an earlier command did, of the same IR"
    parser.add_argument("--no-cache", dest="cache", action="store_false", help=help)


def try_argument(parser: ArgumentParser) -> None:
    """The option of a command that runs the plan's own functions on random numbers."""
    help = "do not try the functions of the plan's `op`s; they are then named as not verified"
    parser.add_argument("--no-try", dest="try_functions", action="store_false", help=help)
