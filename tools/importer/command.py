"""`scalec import`: a plan for a Hugging Face model."""

import re
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ...compiler.cli.command import Command, file_path
from ...compiler.cli.output import UsageError, as_file, cannot_write
from ...compiler.syntax.limits import load
from . import import_config


def import_(options: Namespace) -> None:
    """`scalec import`."""
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


def _import_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "config", type=file_path, metavar="CONFIG", help="the config.json of a model"
    )
    help = "the plan to write (default: standard output)"
    parser.add_argument("-o", "--output", type=file_path, metavar="FILE", help=help)


COMMAND = Command(
    import_,
    _import_arguments,
    "Writes a plan for the model of a config.json, or names the fields that no plan can"
    " express.  To start\n"
    "training from the model's weights, run `train.py --init FOLDER`.",
    "scalec import config.json -o plan.scale",
)
