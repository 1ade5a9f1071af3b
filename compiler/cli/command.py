"""A command of the command line, and arguments that several have."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

PLAN = "a plan (.scale), or IR text that `scalec ir` printed"


class Command(NamedTuple):
    """A command: its name, what it does, its arguments, its help in one line and in full, and an example."""

    name: str
    does: Callable[[Namespace], int | None]
    arguments: Callable[[ArgumentParser], None]
    help: str
    text: str
    example: str
    passes_on: bool = False
    """Whether words after `--` go to train.py."""


def file_path(text: str) -> Path:
    """A path on the command line."""
    if not text:
        raise ArgumentTypeError("it is empty: name a file or a folder")
    if max(map(len, text.encode(errors="surrogateescape").split(b"/"))) > 255:
        raise ArgumentTypeError("it has a name of more than 255 bytes, which no file has")
    return Path(text)


def count(text: str) -> int:
    """A whole number above 0 on the command line."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ArgumentTypeError(f"`{text}` is not a whole number above 0")
    return int(text)


def plan_argument(parser: ArgumentParser) -> None:
    """The plan of a command that takes one."""
    parser.add_argument("plan", type=file_path, metavar="PLAN", help=PLAN)


def output_arguments(parser: ArgumentParser) -> None:
    """The options of a command that compiles into a folder."""
    help = "the folder to write to (default: out/ and the plan's name)"
    parser.add_argument("-o", "--output", type=file_path, metavar="DIR", help=help)
    help = "skip the proof, and say so in the written files"
    parser.add_argument("--no-verify", dest="verify", action="store_false", help=help)
