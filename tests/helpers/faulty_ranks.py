"""Runs of `train.py` in which one rank misbehaves where the test says; no launcher does anything about it."""

import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from runpy import run_path
from typing import Any

import torch
import torch.distributed as dist

from helpers.forked_ranks import HANGS
from scalec.runtime.train.watchdog.limits import Kind
from scalec.runtime.train.watchdog.watcher import Watchdog

Fault = Callable[[], object]


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit status, None where it had to be killed, and its standard error."""

    status: int | None
    error: str


def stop() -> None:
    """As by SIGSTOP: the process is there and does nothing, nor does any of its threads."""
    os.kill(os.getpid(), signal.SIGSTOP)


def die() -> None:
    """As one that the kernel kills for its memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def sleep() -> None:
    """Its other threads go on."""
    time.sleep(10 * HANGS)


def nap() -> None:
    """As a rank that is slow once."""
    time.sleep(1.5)


def fail() -> None:
    """As a mistake in the program."""
    raise ValueError("no such number")


def at_beginning(of: tuple[Kind, int], fault: Fault) -> None:
    """Has this process misbehave when it has begun this, for instance step 3 (from 1)."""
    begin = Watchdog.begin

    def faulty(self: Watchdog, kind: Kind, step: int) -> None:
        begin(self, kind, step)
        if (kind, step) == of:
            fault()

    Watchdog.begin = faulty


def at_call(method: str, size: int, number: int, fault: Fault) -> None:
    """Has this process misbehave before call `number` (from 1) of this method of its process groups of `size` ranks."""
    before: Any = getattr(dist.ProcessGroup, method)
    calls = 0

    def faulty(group: Any, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += group.size() == size
        if calls == number and group.size() == size:
            fault()
        return before(group, *args, **options)

    setattr(dist.ProcessGroup, method, faulty)


def run(folder: Path, world: int, options: str, prepare: Callable[[int], str | None], left: int = -1) -> list[Ended]:
    """Runs `train.py` of `folder` on ranks that first `prepare(rank)`, which may name another file.

    Rank `left` is not waited for: it is killed when all others have ended.
    """
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1]), "WORLD_SIZE": str(world)}
    common["LOCAL_WORLD_SIZE"] = str(world)
    ranks: list[BaseProcess] = [
        multiprocessing.get_context("fork").Process(
            target=_program, args=(folder, common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, options, prepare)
        )
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        if left < 0 or rank is not ranks[left]:
            rank.join(HANGS)
    statuses = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
    return [Ended(status, (folder / f"err{rank}").read_text()) for rank, status in enumerate(statuses)]


def _program(folder: Path, environment: Mapping[str, str], options: str, prepare: Callable[[int], str | None]) -> None:
    for number, stream in enumerate(("out", "err"), start=1):
        os.dup2(os.open(folder / f"{stream}{environment['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    torch.set_num_threads(1)
    os.chdir(folder)
    os.environ.update(environment)
    sys.argv = ["train.py", *options.split()]
    status = 0
    try:
        run_path(prepare(int(environment["RANK"])) or "train.py", run_name="__main__")
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
