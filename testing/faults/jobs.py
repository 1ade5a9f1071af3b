"""Jobs: a program on several ranks of this machine, started, waited for and ended."""

import multiprocessing
import os
import shlex
import signal
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from .fault import Fault
from .ranks import forked, launched, listener, prepare, ran, run_file
from .seams import MARK, processes

TORCHRUN = "scalec.runtime.train.torchrun"
HANGS = 600.0
"""Seconds after which a job is taken to hang."""


@dataclass(frozen=True)
class Program:
    """A program in its folder, in which it also runs, on so many ranks, with the options of a
    shell's line.

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
    """The end of a job: exit statuses, as subprocess has them, of the ranks, or of the launcher if
    there is one; their output and errors, in the same order; a line for each strike; the seconds
    that it took."""

    statuses: tuple[int, ...]
    out: tuple[str, ...]
    err: tuple[str, ...]
    strikes: tuple[str, ...]
    seconds: float

    @property
    def succeeded(self) -> bool:
        """Whether all ended with status 0."""
        return not any(self.statuses)


class Job:
    """A started program.  Leaving it as a context kills all of its processes that are left."""

    def __init__(
        self, folder: Path, before: Collection[Path], started: Sequence[BaseProcess]
    ) -> None:
        self.folder, self._before, self._started, self._began = (
            folder,
            before,
            started,
            time.monotonic(),
        )

    def wait(self, seconds: float = HANGS) -> Outcome:
        """Its end.  TimeoutError, and all processes are killed, where it does not end in time."""
        until = time.monotonic() + seconds
        for process in self._started:
            process.join(max(0.0, until - time.monotonic()))
        ended, took = (
            [process.exitcode for process in self._started],
            time.monotonic() - self._began,
        )
        self.end()
        statuses = tuple(status for status in ended if status is not None)
        if len(statuses) < len(ended):
            late = [number for number, status in enumerate(ended) if status is None]
            raise TimeoutError(
                f"processes {late} did not end within {seconds} s\n{self._read('err')}"
            )
        strikes = tuple(
            mark.read_text() for mark in _marks(self.folder) if mark not in self._before
        )
        return Outcome(statuses, self._read("out"), self._read("err"), strikes, took)

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Whether all of it has, within these seconds each."""
        for process in self._started:
            process.join(seconds)
        return not any(process.is_alive() for process in self._started)

    def _read(self, stream: str) -> tuple[str, ...]:
        files = (self.folder / f"{stream}{number}" for number in range(len(self._started)))
        return tuple(file.read_text(errors="replace") if file.exists() else "" for file in files)

    def processes(self) -> dict[int, int]:
        """The ids of its processes that have begun, by rank, `LAUNCHER` among them."""
        return processes(self.folder)

    def end(self) -> None:
        """Kills what is left of it, also ranks that a launcher has left."""
        for process in self._started:
            process.kill()
        for process in self._started:
            process.join(HANGS)
        until = time.monotonic() + HANGS
        while left := [number for number in self.processes().values() if self._is_running(number)]:
            assert time.monotonic() < until, f"processes {left} do not end"
            for number in left:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            time.sleep(0.01)

    def _is_running(self, process: int) -> bool:
        """Whether it runs, and is no other to which its number has gone."""
        with suppress(FileNotFoundError, ProcessLookupError):
            return str(self.folder).encode() in Path(f"/proc/{process}/cmdline").read_bytes()
        return False

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *raised: object) -> None:
        self.end()


def fork(
    program: Program,
    *faults: Fault,
    folder: Path | None = None,
    main: Callable[[], Any] | None = None,
) -> Job:
    """Starts the ranks without a launcher, as forks of this process, in which a started program
    needs no imports.

    `folder`, beside the program unless named, is the job's: output is in `out0`, `err0` and so on.
    Faults that have struck there do not strike a second time.  `main` is called in place of the
    program's file.
    """
    with listener() as server:
        address, port = server.getsockname()
        common = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        common |= {"WORLD_SIZE": str(program.ranks), "LOCAL_WORLD_SIZE": str(program.ranks)}
        own = [
            common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(program.ranks)
        ]
        return _started(
            program,
            faults,
            folder,
            partial(ran, main or partial(run_file, program.file), server),
            own,
        )


def torchrun(
    program: Program, *faults: Fault, folder: Path | None = None, module: str = TORCHRUN
) -> Job:
    """Starts the program by torchrun, which is the job's one process and restarts ranks if its
    options say so.

    `module` is that of `scalec run`, or torch's own, `torch.distributed.run`.
    """
    options = ["--standalone", f"--nproc-per-node={program.ranks}", *shlex.split(program.launcher)]
    return _started(
        program,
        faults,
        folder,
        partial(launched, module, options, program.file),
        [{"OMP_NUM_THREADS": "1"}],
    )


def _started(
    program: Program,
    faults: Sequence[Fault],
    folder: Path | None,
    main: Callable[[Path], int],
    environments: Sequence[dict[str, str]],
) -> Job:
    """A job of forked processes, with an environment for each."""
    folder = (folder or program.folder / "faults").absolute()
    prepare(folder, faults)
    before, fork = _marks(folder), multiprocessing.get_context("fork").Process
    started = [
        fork(
            target=forked,
            args=(main, number, program.folder, folder, own | program.environment, program.options),
        )
        for number, own in enumerate(environments)
    ]
    for process in started:
        process.start()
    return Job(folder, before, started)


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


def _marks(folder: Path) -> list[Path]:
    """The marks of strikes so far, in their order."""
    return sorted(folder.glob(f"{MARK}*"), key=lambda mark: mark.stat().st_mtime_ns)
