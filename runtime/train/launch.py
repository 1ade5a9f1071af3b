"""Sets up a started process: options, checks before ranks wait for each other, the process
group and the mesh.
"""

import ctypes
import gc
import os
import signal
import sys
from contextlib import suppress
from datetime import timedelta
from io import TextIOWrapper
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist

from ..comm import c10d
from ..comm.address import await_address
from ..comm.mesh import Mesh
from ..config.environment import sanitizing
from ..config.plan import Plan
from ..errors import RunError, count_with_noun, quote_first_names
from .alike import alike, settings
from .allocator import expand_segments
from .options import Options, mesh_words, torchrun
from .sinks import check_sinks

_MEETING = ("RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables by which ranks find each other."""
_TORCHRUN = b"torchrun", b"torch.distributed.run"  # in the command line of torch's launcher
_PARENT_DEATH = 1  # PR_SET_PDEATHSIG of linux/prctl.h
_RECORD = "flight_record_"
"""The beginning of the names of files in the run's folder that have torch's record of a rank's last
calls; the rank follows.
"""
# seconds that a group's limit is above the watchdog's, which says more when it ends a rank
_BEYOND = 60.0


def settle_streams() -> None:
    """Lets terminals show the number of a character that they cannot show."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def end_with_launcher() -> None:
    """Has Linux kill this rank when the torchrun that has started it ends in any way: otherwise
    nobody would end the rank, or notice it.

    Saved files are whole at any moment.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGKILL)
    if os.getppid() != launcher:
        sys.exit(1)


def stop_launcher() -> None:
    """Sends torch's own torchrun, where it has started this rank, the signal of a person who stops
    the run.

    Otherwise it would take a rank that ends by itself for a failed one, and start all anew.  The
    torchrun of `scalec run` can tell the two apart.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    launcher = os.getppid()
    with suppress(OSError):
        line = Path(f"/proc/{launcher}/cmdline").read_bytes()
        if any(name in line for name in _TORCHRUN) and b"scalec.runtime.train.torchrun" not in line:
            os.kill(launcher, signal.SIGTERM)


def check_options(plan: Plan, options: Options) -> None:
    """RunError if the options do not fit each other, the plan, or what is installed."""
    check_sinks(options.log_to)
    if plan.names is None and (options.init or options.export):
        raise RunError(
            "a parameter in more than two nested repeats has no name in files of weights"
        )
    if options.init and options.resume == "newest":
        raise RunError(
            "--init begins a run and --resume goes on with one: choose one, or --resume auto"
        )
    if options.export_dtype and not options.export:
        raise RunError("--export-dtype says how weights are written: it needs --export")
    if options.export and environment("WORLD_SIZE", 1) > 1:
        raise RunError("--export is done by one process: start it with python instead of torchrun")


def check(plan: Plan, options: Options) -> None:
    """RunError if the processes or GPUs do not fit the plan, or this one cannot find the others."""
    ranks, world = prod(plan.mesh.values()), environment("WORLD_SIZE", 1)
    if world != ranks:
        needs = "a plan without a mesh takes"
        if plan.mesh:
            needs = f"the plan's mesh, {mesh_words(plan)}, takes"
        least = f", or at least {plan.smaller[-1].ranks}" if plan.smaller else ""
        raise RunError(
            f"{needs} {count_with_noun(ranks, 'rank')}{least}, not {world};"
            f" start it with: {torchrun(plan)}"
        )
    if (rank := environment("RANK", 0)) >= world:
        raise RunError(
            f"RANK is {rank}, but WORLD_SIZE is {world}; start it with: {torchrun(plan)}"
        )
    environment("MASTER_PORT", 0)
    lacking = [name for name in _MEETING if name not in os.environ]
    if world > 1 and lacking:
        raise RunError(
            f"the environment lacks {quote_first_names(lacking)}; start it with: {torchrun(plan)}"
        )
    local, ranks_of_node = environment("LOCAL_RANK", 0), environment("LOCAL_WORLD_SIZE", 1)
    if options.device == "cuda":
        gpu(local, ranks_of_node)
    if world > 1:
        await_address(os.environ["MASTER_ADDR"], says=local == 0)


def gpu(local: int, ranks_of_node: int) -> int:
    """The index of the GPU of rank `local` of a node with so many ranks: its own GPU, or the only
    one that its launcher shows it.

    Slurm's --gpus-per-task=1, Kubernetes and a CUDA_VISIBLE_DEVICES for each rank show one.  If it
    is the node's only GPU, NCCL refuses two ranks on it.  RunError where there are too few.
    """
    gpus, ranks = torch.cuda.device_count(), max(ranks_of_node, local + 1)
    if gpus == 1:
        return 0
    if gpus < ranks:
        raise RunError(
            f"{count_with_noun(ranks, 'rank')} on this node, but {count_with_noun(gpus, 'GPU')};"
            " with --device cpu it runs without"
        )
    return local


def check_folder(folder: Path) -> None:
    """Makes the folder if it is not there.  RunError unless it can be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot write to {folder}: {obstacle(folder) or error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RunError(f"cannot write to {folder}: Permission denied")


def obstacle(path: Path) -> str:
    """The reason why a path that is there is no folder; "" if it is one, or is not there."""
    if path.is_dir() or not os.path.lexists(path):
        return ""
    if path.exists():
        return "it is a file"
    return f"it is a link to {os.readlink(path)}, which is not there"


def environment(name: str, least: int) -> int:
    """A number that a launcher has set in the environment; `least` where there is none.

    RunError where the variable is no number from `least` upwards.
    """
    value = os.environ.get(name, str(least))
    if not value.isdecimal() or int(value) < least:
        raise RunError(
            f"{name} is `{value}` in the environment, where launchers write a number: unset it"
        )
    return int(value)


def is_first() -> bool:
    """Whether this process is rank 0 of the job, or cannot know."""
    try:
        return not 0 < environment("RANK", 0) < environment("WORLD_SIZE", 1)
    except RunError:
        return True


def warn(line: str) -> None:
    """Prints a line on rank 0's standard error."""
    if is_first():
        print(line, file=sys.stderr)


def connect(plan: Plan, options: Options) -> Mesh:
    """Chooses the device, joins the process group if there are several ranks, and makes the
    mesh.
    """
    device_type = options.device
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device(
            device_type, gpu(environment("LOCAL_RANK", 0), environment("LOCAL_WORLD_SIZE", 1))
        )
        expand_segments(os.environ)
        # torch knows which of its last calls a GPU has done, and writes them where it ends a rank
        # by its own limit
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(flight_record(options.out)))
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // environment("LOCAL_WORLD_SIZE", 1)))
    limit = timedelta(
        seconds=max(options.first_step_limit, options.step_limit or 0, options.save_limit) + _BEYOND
    )
    if environment("WORLD_SIZE", 1) > 1:
        if note := c10d.warning_of_new_version(torch.__version__):
            warn(note)
        c10d.join(device, limit)
        alike(settings(plan, options))  # groups of another mesh would wait for each other
    watch = None
    if plan.watch.replay or sanitizing():
        from ..debug.sanitize import Sanitizer, require_determinism  # most runs do without

        require_determinism()  # or else a step that is run twice differs from itself
        watch = Sanitizer(device) if sanitizing() else None
    return Mesh(plan.mesh, device, watch, limit)


def flight_record(folder: Path, rank: int | str = "") -> Path:
    """The file of a rank's last calls in a run's folder; without a rank, the beginning of the names
    of all such files.
    """
    return folder.absolute() / f"{_RECORD}{rank}"


def settle(mesh: Mesh, options: Options, validates: bool) -> None:
    """After the first step, on all ranks alike: gives groups the time limit of later calls, and
    freezes the objects that live.

    Python's collector skips frozen objects.  A look at all of them takes tens of ms, on each rank
    at another step, and all others wait for it.
    """
    gc.collect()
    gc.freeze()
    if options.step_limit is None or mesh.size(*mesh.axes) == 1:
        return
    longest = max(options.step_limit, options.first_step_limit if validates else 0) + _BEYOND
    for group in {*mesh.groups().values(), dist.group.WORLD}:
        c10d.set_limit(group, timedelta(seconds=longest))
