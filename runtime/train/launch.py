"""Sets up a started process: options, checks before ranks wait for each other, the process group and the mesh."""

import argparse
import os
import shlex
import sys
from dataclasses import dataclass
from io import TextIOWrapper
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..comm.mesh import Mesh, Watch
from ..config.environment import sanitizing
from ..config.plan import Plan
from ..errors import RunError, counted, named
from .allocator import expand_segments

EXPORTED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The element types that weights may be written in, beside the plan's own."""

_MEETING = ("RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables by which ranks find each other."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that a person changes between runs."""

    steps: int
    lr: float
    data: tuple[str, ...]
    seed: int
    resume: bool
    resume_anyway: bool
    init: Path | None
    export: Path | None
    export_dtype: torch.dtype | None
    out: Path
    log_every: int
    eval_every: int
    save_every: int
    device: str


def settle_streams() -> None:
    """Has terminals show the number of a sign that they lack."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def parse(plan: Plan, arguments: list[str] | None = None) -> Options:
    """Options from the command line, with the plan's own values as defaults.  RunError where they are none."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    files = " ".join(plan.data.files).replace("%", "%%")  # argparse formats the help
    parser = _Parser(description=f"Trains {plan.name}.", epilog=f"Start it with: {torchrun(plan)}", allow_abbrev=False)
    add = parser.add_argument
    add("--steps", type=_positive, default=plan.steps, help="train up to this step (default %(default)s)")
    add("--lr", type=float, default=plan.lr, help="peak learning rate (default %(default)s)")
    add("--data", nargs="+", default=plan.data.files, metavar="GLOB", help=f"files to train on (default {files})")
    add("--seed", type=int, default=plan.seed, help="of initial values and data order (default %(default)s)")
    add("--resume", action="store_true", help="go on from the newest checkpoint of the run folder")
    help = "the same, though seed, data, batch or model are not those of the checkpoint"
    add("--resume-anyway", action="store_true", help=help)
    add("--init", type=_path, metavar="PATH", help="begin with these weights: a .safetensors file, or a folder of them")
    help = "write the newest checkpoint of the run folder as safetensors into this new folder, and end; one process"
    add("--export", type=_path, metavar="DIR", help=help)
    help = "element type of what is exported (default that in which the model computes); fp32 keeps masters whole"
    add("--export-dtype", choices=tuple(EXPORTED), help=help)
    add("--out", type=_path, default=Path("runs", plan.name), metavar="DIR", help="run folder (default %(default)s)")
    add("--log-every", type=_positive, default=10, metavar="N", help="steps between lines (default %(default)s)")
    add("--eval-every", type=_positive, default=100, metavar="N", help="steps between validation (default %(default)s)")
    add("--save-every", type=_positive, default=500, metavar="N", help="steps between saves (default %(default)s)")
    add("--device", choices=("cpu", "cuda"), default=device, help="default here: %(default)s")
    values: dict[str, Any] = vars(parser.parse_args(arguments))
    values["resume"] |= values["resume_anyway"]
    values["data"] = tuple(values["data"])
    values["export_dtype"] = EXPORTED.get(values["export_dtype"])
    return Options(**values)


class _Parser(argparse.ArgumentParser):
    """Has a mistake told as any other, and once, not by each rank."""

    def error(self, message: str) -> NoReturn:
        raise RunError(f"{message}; --help lists the options")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name a file or a folder")
    return Path(text)


def torchrun(plan: Plan, *arguments: str) -> str:
    """The command that starts the program on the plan's mesh, to be copied into a shell."""
    ranks = prod(plan.mesh.values())
    nodes = f"--nnodes={plan.nodes}" if plan.nodes > 1 else "--standalone"
    launcher = ["python"] if ranks == 1 else ["torchrun", nodes, f"--nproc-per-node={ranks // plan.nodes}"]
    return shlex.join([*launcher, sys.argv[0], *arguments])


def mesh_words(plan: Plan) -> str:
    """For instance `dp 2 x tp 2`."""
    return " x ".join(f"{name} {size}" for name, size in plan.mesh.items())


def going_on(plan: Plan, steps: int) -> str:
    """The command that takes this run on to `steps`, with every other option that it was given."""
    replaced = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    replaced.add_argument("--steps")
    replaced.add_argument("--init")
    replaced.add_argument("--resume", action="store_true")
    replaced.add_argument("--resume-anyway", action="store_true")
    kept = replaced.parse_known_args()[1]
    return torchrun(plan, "--resume", "--steps", str(steps), *kept)


def check_options(plan: Plan, options: Options) -> None:
    """RunError if the options do not fit each other or the plan."""
    if plan.names is None and (options.init or options.export):
        raise RunError("this plan has no `names hf { … }`, which says what tensors are called in files of weights")
    if options.init and options.resume:
        raise RunError("--init begins a run and --resume goes on with one: choose one")
    if options.export_dtype and not options.export:
        raise RunError("--export-dtype says how weights are written: it needs --export")
    if options.export and _environment("WORLD_SIZE", 1) > 1:
        raise RunError("--export is done by one process: start it with python instead of torchrun")


def check(plan: Plan, options: Options) -> None:
    """RunError if the processes or GPUs do not fit the plan."""
    ranks, world = prod(plan.mesh.values()), _environment("WORLD_SIZE", 1)
    if world != ranks:
        asked = f"the plan's mesh, {mesh_words(plan)}, takes" if plan.mesh else "a plan without a mesh takes"
        raise RunError(f"{asked} {counted(ranks, 'rank')}, not {world}; start it with: {torchrun(plan)}")
    _check_rank(plan, world)
    local, gpus = max(_environment("LOCAL_WORLD_SIZE", 1), _environment("LOCAL_RANK", 0) + 1), torch.cuda.device_count()
    if options.device == "cuda" and gpus < local:
        raise RunError(
            f"{counted(local, 'rank')} on this node, but {counted(gpus, 'GPU')}; with --device cpu it runs without"
        )


def _check_rank(plan: Plan, world: int) -> None:
    """RunError if this process is none of the ranks, or cannot find the others."""
    if (rank := _environment("RANK", 0)) >= world:
        raise RunError(f"RANK is {rank}, but WORLD_SIZE is {world}; start it with: {torchrun(plan)}")
    _environment("MASTER_PORT", 0)
    if world > 1 and (lacking := [name for name in _MEETING if name not in os.environ]):
        raise RunError(f"the environment lacks {named(lacking)}; start it with: {torchrun(plan)}")


def check_folder(folder: Path) -> None:
    """RunError unless the folder can be written to, which is made if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot write to {folder}: {'it is a file' if folder.is_file() else error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RunError(f"cannot write to {folder}: Permission denied")


def _environment(name: str, least: int) -> int:
    """A number that a launcher gives; `least` where there is none.  RunError where it is no such number."""
    value = os.environ.get(name, str(least))
    if not value.isdecimal() or int(value) < least:
        raise RunError(f"{name} is `{value}` in the environment, where launchers write a number: unset it")
    return int(value)


def is_first() -> bool:
    """Whether this process is rank 0 of the job, or cannot know."""
    try:
        return not 0 < _environment("RANK", 0) < _environment("WORLD_SIZE", 1)
    except RunError:
        return True


def warn(line: str) -> None:
    """A line on rank 0's standard error."""
    if is_first():
        print(line, file=sys.stderr)


def connect(plan: Plan, device_type: str) -> Mesh:
    """Chooses the device, joins the process group if there are several ranks, and makes the mesh."""
    local = _environment("LOCAL_RANK", 0)
    device = torch.device(device_type, local) if device_type == "cuda" else torch.device(device_type)
    if device_type == "cuda":
        expand_segments(os.environ)
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // _environment("LOCAL_WORLD_SIZE", 1)))
    if _environment("WORLD_SIZE", 1) > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")
    return Mesh(plan.mesh, device, _watch(device))


def _watch(device: torch.device) -> Watch | None:
    """The watch of a sanitized run."""
    if not sanitizing():
        return None
    from ..debug.sanitize import Sanitizer, require_determinism  # most runs do without

    require_determinism()
    return Sanitizer(device)
