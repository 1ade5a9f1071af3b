"""From a started process to a mesh: options, the checks that must come before ranks wait for each other, the group.

Non-goals: starting the processes (torchrun's task).
"""

import argparse
import os
import shlex
import sys
from dataclasses import dataclass
from io import TextIOWrapper
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .errors import RunError, counted
from .mesh import Mesh, Watch
from .plan import Plan

EXPORTED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The element types that weights may be written in, beside the plan's own."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a person changes between runs."""

    steps: int
    lr: float
    data: tuple[str, ...]
    seed: int
    resume: bool
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
    """Options from the command line, with the plan's own values as defaults."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    files = " ".join(plan.data.files).replace("%", "%%")  # argparse formats the help
    parser = argparse.ArgumentParser(
        description=f"Trains {plan.name}.", epilog=f"Start it with: {torchrun(plan)}", allow_abbrev=False
    )
    add = parser.add_argument
    add("--steps", type=_positive, default=plan.steps, help="train up to this step (default %(default)s)")
    add("--lr", type=float, default=plan.lr, help="peak learning rate (default %(default)s)")
    add("--data", nargs="+", default=plan.data.files, metavar="GLOB", help=f"files to train on (default {files})")
    add("--seed", type=int, default=plan.seed, help="of initial values and data order (default %(default)s)")
    add("--resume", action="store_true", help="go on from the newest checkpoint of the run folder")
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
    values["data"] = tuple(values["data"])
    values["export_dtype"] = EXPORTED.get(values["export_dtype"])
    return Options(**values)


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
    local, gpus = _environment("LOCAL_WORLD_SIZE", 1), torch.cuda.device_count()
    if options.device == "cuda" and gpus < local:
        raise RunError(
            f"{counted(local, 'rank')} on this node, but {counted(gpus, 'GPU')}; with --device cpu it runs without"
        )


def _environment(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


def is_first() -> bool:
    """Whether this process is rank 0 of the job."""
    return _environment("RANK", 0) == 0


def recording() -> bool:
    """Whether SCALEC_RECORD=1 asks for a record of every collective."""
    return os.environ.get("SCALEC_RECORD") == "1"


def sanitizing() -> bool:
    """Whether SCALEC_SANITIZE=1 asks that copies be compared."""
    return os.environ.get("SCALEC_SANITIZE") == "1"


@dataclass(frozen=True)
class Profiled:
    """Which steps of a run are profiled, from `first` to `last`, counted from 1, and where that is written."""

    folder: Path
    first: int
    last: int


def profiling() -> Profiled | None:
    """What SCALEC_PROFILE=FOLDER asks for, with SCALEC_PROFILE_STEPS=N-M.  RunError."""
    folder, steps = os.environ.get("SCALEC_PROFILE"), os.environ.get("SCALEC_PROFILE_STEPS", "3-5")
    if not folder:
        return None
    first, _, last = steps.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise RunError(f"SCALEC_PROFILE_STEPS is `{steps}`: write the first and the last step of the run, as in 3-5")
    return Profiled(Path(folder), int(first), int(last))


def connect(plan: Plan, device_type: str) -> Mesh:
    """Chooses the device, joins the process group if there are several ranks, and makes the mesh."""
    local = _environment("LOCAL_RANK", 0)
    device = torch.device(device_type, local) if device_type == "cuda" else torch.device(device_type)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // _environment("LOCAL_WORLD_SIZE", 1)))
    if _environment("WORLD_SIZE", 1) > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")
    return Mesh(plan.mesh, device, _watch(device))


def _watch(device: torch.device) -> Watch | None:
    """What looks at every value of a sanitized run."""
    if not sanitizing():
        return None
    from .sanitize import Sanitizer, require_determinism  # most runs do without

    require_determinism()
    return Sanitizer(device)
