"""Jobs: a program on several ranks of this machine, started, waited for and ended."""

import multiprocessing
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from .actions import LAUNCHER
from .fault import Fault
from .ranks import forked, note, prepare, run_file
from .seams import MARK, processes

HANGS = 600.0
"""Seconds after which a job is taken to hang."""


@dataclass(frozen=True)
class Program:
    """A program in its folder, in which it also runs, on so many ranks, with the options of a shell's line.

    `launcher` is options of torchrun; `environment` is added to that of this process.
    """

    folder: Path
    ranks: int
    options: str = ""
    file: str = "train.py"
    launcher: str = ""
    environment: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Outcome:
    """The end of a job: exit statuses, as subprocess has them, of the ranks, or of the launcher if there is one; their
    output and errors, in the same order; a line for each strike; the seconds that it took."""

    statuses: tuple[int, ...]
    out: tuple[str, ...]
    err: tuple[str, ...]
    strikes: tuple[str, ...]
    seconds: float

    @property
    def succeeded(self) -> bool:
        """Whether all ended with status 0."""
        return not any(self.statuses)


def command(process: int) -> bytes:
    """The command line of a process; empty where it has ended, or is about to."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{process}/cmdline").read_bytes()
    return b""


class _Process(Protocol):
    def wait(self, seconds: float) -> int | None: ...  # its exit status, None if it has none after these seconds

    def kill(self) -> None: ...


class _Forked:
    def __init__(self, process: BaseProcess) -> None:
        process.start()
        self._process, self.kill = process, process.kill

    def wait(self, seconds: float) -> int | None:
        self._process.join(seconds)
        return self._process.exitcode


class _Launcher:
    """A launcher, and the ranks that it has started, which its own end may leave."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process, self._folder = process, folder

    def wait(self, seconds: float) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def kill(self) -> None:
        self._process.kill()
        until = time.monotonic() + HANGS
        while left := [process for process in processes(self._folder).values() if self._is_ours(process)]:
            assert time.monotonic() < until, f"processes {left} do not end"
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.01)

    def _is_ours(self, process: int) -> bool:
        """Whether it runs, and is no other to which its number has gone."""
        return str(self._folder).encode() in command(process)


class Job:
    """A started program.  Leaving it as a context kills all of its processes that are left."""

    def __init__(self, folder: Path, before: Collection[Path], started: list[_Process]) -> None:
        self.folder, self._before, self._started, self._began = folder, before, started, time.monotonic()

    def wait(self, seconds: float = HANGS) -> Outcome:
        """Its end.  TimeoutError, and all processes are killed, where it does not end in time."""
        until = time.monotonic() + seconds
        ended = [process.wait(max(0.0, until - time.monotonic())) for process in self._started]
        took = time.monotonic() - self._began
        self.end()
        if late := [number for number, status in enumerate(ended) if status is None]:
            raise TimeoutError(f"processes {late} did not end within {seconds} s\n{self._read('err')}")
        statuses = tuple(status for status in ended if status is not None)
        strikes = tuple(mark.read_text() for mark in _marks(self.folder) if mark not in self._before)
        return Outcome(statuses, self._read("out"), self._read("err"), strikes, took)

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Whether all of it has, within these seconds each."""
        return all(process.wait(seconds) is not None for process in self._started)

    def _read(self, stream: str) -> tuple[str, ...]:
        files = (self.folder / f"{stream}{number}" for number in range(len(self._started)))
        return tuple(file.read_text(errors="replace") if file.exists() else "" for file in files)

    def processes(self) -> dict[int, int]:
        """The ids of its processes that have begun, by rank, `LAUNCHER` among them."""
        return processes(self.folder)

    def end(self) -> None:
        """Kills what is left of it."""
        for process in self._started:
            process.kill()
        for process in self._started:
            process.wait(HANGS)

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *raised: object) -> None:
        self.end()


def fork(program: Program, *faults: Fault, folder: Path | None = None, main: Callable[[], Any] | None = None) -> Job:
    """Starts the ranks without a launcher, as forks of this process, in which a started program needs no imports.

    `folder`, beside the program unless named, is the job's: output is in `out0`, `err0` and so on.  Faults that have
    struck there do not strike a second time.  `main` is called in place of the program's file.
    """
    folder = _prepared(program, faults, folder)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
    common = meeting | {"WORLD_SIZE": str(program.ranks), "LOCAL_WORLD_SIZE": str(program.ranks)} | program.environment
    before, fork = _marks(folder), multiprocessing.get_context("fork")

    def started(rank: int) -> _Process:
        own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        does = main or partial(run_file, program.file)
        return _Forked(fork.Process(target=forked, args=(does, program.folder, folder, own, program.options)))

    return Job(folder, before, [started(rank) for rank in range(program.ranks)])


def torchrun(program: Program, *faults: Fault, folder: Path | None = None) -> Job:
    """Starts the program by torchrun, which is the job's one process and restarts ranks if its options say so."""
    folder = _prepared(program, faults, folder)
    launch = ["scalec.runtime.train.torchrun", "--standalone", f"--nproc-per-node={program.ranks}"]
    rank = ["-m", "scalec.testing.faults", str(folder), program.file, *shlex.split(program.options)]
    with (folder / "out0").open("wb") as out, (folder / "err0").open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", *launch, *shlex.split(program.launcher), *rank],
            cwd=program.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **program.environment},
            stdout=out,
            stderr=err,
        )
    note(folder, LAUNCHER, process.pid)
    return Job(folder, _marks(folder), [_Launcher(process, folder)])


def until_done(start: Callable[[int], Job], most: int, seconds: float = HANGS) -> list[Outcome]:
    """All ends of a program that is started until it succeeds, as a scheduler requeues it.

    `start` is given how often it has been started.  AssertionError after `most` times.
    """
    ends = list[Outcome]()
    while not (ends and ends[-1].succeeded):
        assert len(ends) < most, f"started {most} times, and not done:\n{ends[-1].err}"
        with start(len(ends)) as job:
            ends.append(job.wait(seconds))
    return ends


def _prepared(program: Program, faults: Sequence[Fault], folder: Path | None) -> Path:
    folder = (folder or program.folder / "faults").absolute()
    prepare(folder, faults)
    return folder


def _marks(folder: Path) -> list[Path]:
    """The marks of strikes so far, in their order."""
    return sorted(folder.glob(f"{MARK}*"), key=lambda mark: mark.stat().st_mtime_ns)
