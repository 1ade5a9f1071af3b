"""A program on one rank of this machine, with its faults."""

import gc
import os
import pickle
import shlex
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from runpy import run_path
from typing import Any, NoReturn

import torch

from .actions import LAUNCHER
from .fault import Fault
from .seams import Points

FAULTS = "faults.pickle"


def prepare(folder: Path, faults: Sequence[Fault]) -> None:
    """Gives a folder what its ranks are to read; marks of earlier strikes stay."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.pid"):
        old.unlink()
    (folder / FAULTS).write_bytes(pickle.dumps(tuple(faults)))


def note(folder: Path, rank: int, process: int) -> None:
    """Writes a process' id where the others of its job find it, at once."""
    part = folder / f".{rank}"
    part.write_text(str(process))
    part.rename(folder / f"{rank}.pid")


def begin(folder: Path, rank: int) -> None:
    """Has the folder's faults strike in this process."""
    note(folder, rank, os.getpid())
    points = Points(pickle.loads((folder / FAULTS).read_bytes()), folder, rank)
    points.install()
    points.come_to("start")


def forked(
    main: Callable[[Path], int],
    number: int,
    folder: Path,
    faults: Path,
    environment: Mapping[str, str],
    options: str,
) -> None:
    """Calls `main` in a forked process as a program of its own in `folder`, its output in
    `faults`.
    """
    gc.freeze()  # a collector that looks at all that the forking process has copies it
    for descriptor, stream in enumerate(("out", "err"), start=1):
        os.dup2(
            os.open(faults / f"{stream}{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor
        )
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.chdir(folder)
    os.environ.update(environment)
    sys.argv = ["train.py", *shlex.split(options)]
    status = main(faults)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def listener() -> socket.socket:
    """A socket that the store of rank 0 takes over: a port that is only looked for may be
    another's by then.
    """
    return socket.create_server(("127.0.0.1", 0))


def ran(main: Callable[[], Any], server: socket.socket, folder: Path) -> int:
    """The exit status with which Python would end after `main` on this rank; 99 where it raises.

    Ranks meet at `server`, which listens from before they begin.
    """
    torch.set_num_threads(1)
    try:
        begin(folder, rank := int(os.environ["RANK"]))
        if rank:
            server.close()
        else:
            fd = server.detach()
            for name in (
                "torch.distributed",
                "torch.distributed.rendezvous",
            ):  # a function of the one has the other's name
                meeting: Any = import_module(name)
                meeting.TCPStore = partial(meeting.TCPStore, master_listen_fd=fd)
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        return 99
    return 0


def launched(module: str, options: Sequence[str], file: str, folder: Path) -> NoReturn:
    """Has this process be torchrun, with these options, of a program's ranks."""
    note(folder, LAUNCHER, os.getpid())
    rank = ["-m", f"{__package__}", str(folder), file, *sys.argv[1:]]
    os.execv(sys.executable, [sys.executable, "-m", module, *options, *rank])


def run_file(file: str) -> None:
    """Runs a program's file as Python does."""
    run_path(file, run_name="__main__")
