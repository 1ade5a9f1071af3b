"""Options of a run, which a person may change on the command line, and the commands that start
it.
"""

import argparse
import math
import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from ..config.plan import Plan
from ..errors import RunError
from .sinks import SINKS

EXPORTED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The element types that weights may be written in, beside the plan's own."""

RESTARTS = 10
"""How many times a node of an elastic run starts its ranks anew after one of them has failed."""

SEPARATE_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
"""The setting that has torchrun's ranks meet in a new store at each start.

torchrun's own store has the keys of earlier starts, and torch 2.13 looks for it where it was,
though its node is lost.
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that a person changes between runs."""

    steps: int
    lr: float
    data: tuple[str, ...]
    data_as_is: bool
    seed: int
    resume: Literal["", "newest", "auto"]
    resume_anyway: bool
    init: Path | None
    export: Path | None
    export_dtype: torch.dtype | None
    out: Path
    log_to: tuple[str, ...]
    log_every: int
    eval_every: int
    save_every: int
    keep: int
    keep_every: int
    device: str
    first_step_limit: float
    step_limit: float | None
    save_limit: float
    given: tuple[str, ...] = field(default=(), compare=False)
    """The names of the options that are on the command line, sorted; ranks compare values alone."""


def parse(plan: Plan, arguments: list[str] | None = None) -> Options:
    """Options from the command line, with the plan's own values as defaults.

    RunError where an option is wrong.
    """
    parser = _Parser(
        description=f"Trains {plan.name}.",
        epilog=f"Start it with: {torchrun(plan)}",
        allow_abbrev=False,
    )
    _add_training(parser, plan)
    _add_beginnings(parser)
    _add_outputs(parser, plan)
    _add_limits(parser)
    values: dict[str, Any] = vars(parser.parse_args(arguments))
    words = sys.argv[1:] if arguments is None else arguments
    names = {word.partition("=")[0] for word in words if word.startswith("--")}
    values["given"] = tuple(sorted(names))
    if values["resume_anyway"] and not values["resume"]:
        values["resume"] = "newest"
    values["data"], values["log_to"] = tuple(values["data"]), tuple(dict.fromkeys(values["log_to"]))
    values["export_dtype"] = EXPORTED.get(values["export_dtype"])
    return Options(**values)


def _add_training(parser: argparse.ArgumentParser, plan: Plan) -> None:
    """Adds the options of steps and data."""
    add = parser.add_argument
    add(
        "--steps",
        type=_positive,
        default=plan.steps,
        help="train up to this step (default %(default)s)",
    )
    add("--lr", type=_rate, default=plan.lr, help="peak learning rate (default %(default)s)")
    files = " ".join(plan.data.files or (data_set.name for data_set in plan.data.sets))
    files = files.replace("%", "%%")  # argparse formats it
    add(
        "--data",
        nargs="+",
        default=plan.data.files,
        metavar="GLOB",
        help=f"files to train on (default {files})",
    )
    help = "read these files though they seem to be of another format than the plan's data"
    add("--data-as-is", action="store_true", help=help)
    add(
        "--seed",
        type=int,
        default=plan.seed,
        help="seed of values and data order (default %(default)s)",
    )


def _add_beginnings(parser: argparse.ArgumentParser) -> None:
    """Adds the options of checkpoints and weights to begin with, and of an export."""
    add = parser.add_argument
    help = "go on from the newest checkpoint of the run folder; `auto`: if there is one, else begin"
    add(
        "--resume",
        nargs="?",
        const="newest",
        default="",
        choices=("newest", "auto"),
        metavar="auto",
        help=help,
    )
    help = "the same, even if seed, data, batch or model differ from those of the checkpoint"
    add("--resume-anyway", action="store_true", help=help)
    add(
        "--init",
        type=_path,
        metavar="PATH",
        help="begin with these weights: a .safetensors file, or a folder of them",
    )
    help = (
        "write the newest checkpoint of the run folder as safetensors into this new folder,"
        " and end; one process"
    )
    add("--export", type=_path, metavar="DIR", help=help)
    help = (
        "element type of the export (default: that in which the model computes); fp32 keeps"
        " master weights whole"
    )
    add("--export-dtype", choices=tuple(EXPORTED), help=help)


def _add_outputs(parser: argparse.ArgumentParser, plan: Plan) -> None:
    """Adds the options of the run folder, the log and saves."""
    add = parser.add_argument
    add(
        "--out",
        type=_path,
        default=Path("runs", plan.name),
        metavar="DIR",
        help="run folder (default %(default)s)",
    )
    help = f"write the numbers of log.jsonl to these, too: {', '.join(SINKS)}"
    add("--log-to", nargs="+", default=(), choices=tuple(SINKS), metavar="PLACE", help=help)
    help = "steps between lines (default %(default)s); steps 1 to 3 have one, too"
    add("--log-every", type=_positive, default=10, metavar="N", help=help)
    add(
        "--eval-every",
        type=_positive,
        default=100,
        metavar="N",
        help="steps between validation (default %(default)s)",
    )
    help = "steps between saves (default %(default)s)"
    add("--save-every", type=_positive, default=plan.save_every, metavar="N", help=help)
    help = "newest checkpoints to keep (default %(default)s)"
    add("--keep", type=_positive, default=plan.keep, metavar="N", help=help)
    help = "keep checkpoints of steps that N divides, too (default %(default)s; 0: none)"
    add("--keep-every", type=_natural, default=plan.keep_every, metavar="N", help=help)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the device and of the watchdog's limits."""
    add = parser.add_argument
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=("cpu", "cuda"), default=device, help="default here: %(default)s")
    help = (
        "end all ranks if one makes no progress for so long before the first step is done"
        " (default %(default)s)"
    )
    add("--first-step-limit", type=_seconds, default=1800.0, metavar="SECONDS", help=help)
    help = (
        "the same in later steps (default 10 times the longest so far, 30 at least; 120 in the"
        " first steps)"
    )
    add("--step-limit", type=_seconds, metavar="SECONDS", help=help)
    help = "the same in a save, without the pauses between its tries (default %(default)s)"
    add("--save-limit", type=_seconds, default=1800.0, metavar="SECONDS", help=help)


class _Parser(argparse.ArgumentParser):
    """Raises a RunError for a mistake, which one rank tells, and prints the help on one rank."""

    def print_help(self, file: Any = None) -> None:
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        raise RunError(f"{message}; --help lists the options")


def _positive(text: str) -> int:
    return _whole(text, 1)


def _natural(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number from {least} upwards")
    return int(text)


def _seconds(text: str) -> float:
    if not (number := _number(text)) > 0:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number of seconds above 0")
    return number


def _rate(text: str) -> float:
    if not 0 <= (number := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number from 0 upwards")
    return number


def _number(text: str) -> float:
    """The number; NaN, which is neither above nor below any number, where the text is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name a file or a folder")
    return Path(text)


def torchrun(plan: Plan, *arguments: str) -> str:
    """The command that starts the program on the plan's mesh, on each node; for several nodes
    `$HEAD` is one of them.
    """
    plan, elastic = plan.largest or plan, loses_nodes(plan)
    nodes = [f"--nnodes={plan.nodes}"] if plan.nodes > 1 else ["--standalone"]
    if elastic:
        nodes = [f"--nnodes={plan.smaller[-1].nodes}:{plan.nodes}", f"--max-restarts={RESTARTS}"]
        others = [argument for argument in arguments if argument != "--resume"]
        arguments = ("--resume", "auto", *others)
    launcher = ["python"]
    if plan.ranks > 1:
        launcher = ["torchrun", *nodes, f"--nproc-per-node={plan.ranks // plan.nodes}"]
    meeting = " --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29500" if plan.nodes > 1 else ""
    return (
        f"{SEPARATE_STORES} " * elastic
        + f"{shlex.join(launcher)}{meeting} {shlex.join([sys.argv[0], *arguments])}"
    )


def loses_nodes(plan: Plan) -> bool:
    """Whether a plan, on the largest of its meshes or another, goes on with fewer nodes."""
    plan = plan.largest or plan
    return bool(plan.smaller) and plan.smaller[-1].nodes < plan.nodes


def mesh_words(plan: Plan) -> str:
    """For instance `dp 2 x tp 2`."""
    return " x ".join(f"{name} {size}" for name, size in plan.mesh.items())


def going_on(plan: Plan, steps: int) -> str:
    """The command that takes this run on to `steps`, with all other options of its command line."""
    replaced = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    replaced.add_argument("--steps")
    replaced.add_argument("--init")
    replaced.add_argument("--resume", nargs="?")
    replaced.add_argument("--resume-anyway", action="store_true")
    options, others = replaced.parse_known_args()
    resume = ["--resume"]
    if options.resume == "auto" and not loses_nodes(plan):
        resume.append("auto")
    return torchrun(plan, *resume, "--steps", str(steps), *others)
