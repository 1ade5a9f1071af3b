"""The outputs of a run, tried before its first step: a run of days must not find out at its first
save that it cannot write.

A try leaves nothing behind: the code that writes into a folder makes it.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname

from ..config.environment import profiling, recording
from ..errors import RunError
from .launch import environment, is_first, obstacle
from .log_file import NAME, REPEATED
from .options import Options


@dataclass(frozen=True)
class Output:
    """A file or a folder that a run writes: rank 0 alone, or ranks of all nodes."""

    path: Path
    is_folder: bool = True
    on_all_nodes: bool = False


def outputs(options: Options, checkpoints: Path) -> Iterator[Output]:
    """Everything that a run with these options and variables of the environment writes."""
    yield Output(checkpoints, on_all_nodes=True)
    yield Output(options.out / NAME, is_folder=False)
    yield Output(options.out / REPEATED, is_folder=False)
    for place in options.log_to:
        yield Output(options.out / place)
    if recording():
        yield Output(options.out / "recorded", on_all_nodes=True)
    if profile := profiling():
        yield Output(profile.folder, on_all_nodes=True)


def require_writable(options: Options, checkpoints: Path) -> None:
    """RunError unless this rank can write to each of its outputs.  One rank of each node tries."""
    if environment("LOCAL_RANK", 0) > 0:
        return
    for output in outputs(options, checkpoints):
        if not (output.on_all_nodes or is_first()):
            continue
        if trouble := _trouble(output):
            who = "" if is_first() else f"rank {environment('RANK', 0)} on {gethostname()} "
            raise RunError(f"{who}cannot write to {output.path}: {trouble}")


def require_new_folder(folder: Path) -> None:
    """RunError where a folder is there already, or cannot be made."""
    if os.path.lexists(folder):
        raise RunError(f"{folder} is there already: name a new folder")
    if trouble := _trouble(Output(folder)):
        raise RunError(f"cannot write to {folder}: {trouble}")


def _trouble(output: Output) -> str:
    """The reason why an output cannot be written to; "" if it can."""
    path = output.path
    try:
        if output.is_folder:
            return _try_folder(path)
        _try_file(path)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _try_folder(path: Path) -> str:
    """Writes a file into the folder, or into the nearest one above it that is there.  OSError."""
    above = (path.absolute(), *path.absolute().parents)
    nearest = next(folder for folder in above if os.path.lexists(folder))
    if fault := obstacle(nearest):
        if nearest == path.absolute():
            return fault
        return f"{nearest}: {fault}"
    probe = nearest / f".probe-{environment('RANK', 0)}-{os.getpid()}"
    probe.write_text("x")
    probe.unlink()
    return ""


def _try_file(path: Path) -> None:
    """Opens the file to append to it; one that was not there is removed.  OSError."""
    was_there = path.exists()
    with path.open("a", encoding="utf-8"):
        pass
    if not was_there:
        path.resolve().unlink()
