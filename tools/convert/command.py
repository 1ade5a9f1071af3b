"""The command `convert`: a checkpoint of a run to torch.distributed.checkpoint, and back."""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ...compiler.cli.command import Command, file_path, need, plan_argument
from ...compiler.cli.compile import load
from ...compiler.cli.output import UsageError, show
from ...compiler.ir import Program
from .checkpoint_names import OWN, Table, checkpoint_names, find_unnamed_tensors, table, tables

_NO_NAMES = (
    "`names hf`, which says where Hugging Face's files hold each parameter: docs/language.md"
)


def convert(options: Namespace) -> int:
    """`scalec convert`."""
    import subprocess

    if options.source.suffix in (".scale", ".ir"):
        from .checkpoint import explain_handover

        show(explain_handover(load(options.plan).program, load(options.source).program))
        return 0
    if options.output is None:
        raise UsageError("convert needs a name for its result: -o TARGET")
    for package in ("torch", "safetensors"):
        need(package, "converting")
    program = load(options.plan).program
    table = None if options.names == OWN else _table(options.names, program)
    command = [
        sys.executable,
        "-m",
        "scalec.runtime.checkpoint.convert",
        str(options.source),
        str(options.output),
    ]
    return subprocess.run(
        command, input=checkpoint_names(program, table), text=True, check=False
    ).returncode


def _table(name: str, program: "Program") -> "Table":
    """The table of that name or in that file.  UsageError unless it names all tensors of a plan."""
    if not program.names:
        raise UsageError(f"other names need the plan's {_NO_NAMES}")
    shipped = tables()
    table = shipped[name] if name in shipped else _of_file(Path(name), [*shipped])
    if lacking := find_unnamed_tensors(program, table):
        raise UsageError(
            f"`{lacking[0]}` has no name in {name}: give a table of your own, --names FILE.json"
        )
    return table


def _of_file(path: Path, shipped: list[str]) -> "Table":
    import json

    try:
        return table(json.loads(path.read_bytes()))
    except OSError as error:
        names = ", ".join(["scalec", *shipped])
        raise UsageError(
            f"cannot read `{path}`: --names takes {names}, or a table in a file"
        ) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"`{path}` is no table of names: docs/how_to.md shows one") from error


def _arguments(parser: ArgumentParser) -> None:
    plan_argument(parser)
    help = (
        "a checkpoint of a run, step-NNNNNN, or the run's folder for the newest; a folder of"
        " torch's to go back from; "
        "or a second plan, to see who writes and who reads a checkpoint of the first"
    )
    parser.add_argument("source", type=file_path, metavar="SOURCE", help=help)
    help = "the new folder; going back, the new checkpoint, step-NNNNNN"
    parser.add_argument("-o", "--output", type=file_path, metavar="TARGET", help=help)
    help = "names in torch's folder: scalec (default), hf, torchtitan, or a table in a file"
    parser.add_argument("--names", default="scalec", metavar="NAMES", help=help)


COMMAND = Command(
    convert,
    _arguments,
    "Writes parameters and optimizer state of a checkpoint as safetensors that"
    " torch.distributed.checkpoint reads\n"
    "(HuggingFaceStorageReader), bit for bit, in one process; or makes a checkpoint, with"
    " which a run goes on, of\n"
    "such a folder, or of one in torch's own format.  Every tensor is checked against the"
    " plan, and the result gets\n"
    "its name only when it is whole.  With two plans it says how a checkpoint of the first is"
    " written, each element\n"
    "once as their types show, and how the second reads it: a run goes on with it as it is, on"
    " any mesh.",
    "scalec convert plans/tiny_llama.scale runs/tiny_llama -o titan --names torchtitan",
)
