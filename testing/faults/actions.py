"""Actions of faults."""

import errno
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from .fault import Memory, Scene

LAUNCHER = -1
"""The launcher, where an action names ranks."""


@dataclass(frozen=True)
class Send:
    """A signal to some ranks, or to this one; after `seconds`, if given, they may go on
    (SIGCONT).
    """

    signal: signal.Signals
    ranks: tuple[int, ...] = ()
    seconds: float | None = None

    def strike(self, scene: Scene) -> None:
        chosen = sorted(self.ranks or (scene.rank,), key=lambda rank: rank == scene.rank)
        processes = [scene.processes[rank] for rank in chosen]
        if self.seconds is not None:
            names = " ".join(map(str, processes))
            subprocess.Popen(
                ["sh", "-c", f"sleep {self.seconds}; kill -CONT {names}"], start_new_session=True
            )
        for process in processes:
            os.kill(process, self.signal)


def kill(*ranks: int) -> Send:
    """SIGKILL to these ranks, or `LAUNCHER`; to the rank at the point where none is named."""
    return Send(signal.SIGKILL, ranks)


def stop(seconds: float | None = None, *ranks: int) -> Send:
    """SIGSTOP, and after `seconds` SIGCONT; without seconds they stay stopped."""
    return Send(signal.SIGSTOP, ranks, seconds)


@dataclass(frozen=True)
class Slow:
    """A wait of some seconds."""

    seconds: float

    def strike(self, scene: Scene) -> None:
        time.sleep(self.seconds)


@dataclass(frozen=True)
class Raise:
    """An exception of a kind, with these arguments, raised where the rank is."""

    kind: type[Exception]
    arguments: tuple[int | str, ...] = ()

    def strike(self, scene: Scene) -> None:
        raise self.kind(*self.arguments)


def disk_full() -> Raise:
    """The error of a disk without space, at a `write`, a `sync` or a `publish`."""
    return Raise(OSError, (errno.ENOSPC, os.strerror(errno.ENOSPC)))


@dataclass(frozen=True)
class Corrupt:
    """All bits of one byte inverted, at a part (0 to 1) of the last file, by name, that a
    pattern matches.
    """

    files: str
    at: float = 0.5

    def strike(self, scene: Scene) -> None:
        for file in _last(self.files):
            data = bytearray(file.read_bytes())
            data[min(int(self.at * len(data)), len(data) - 1)] ^= 0xFF
            file.write_bytes(data)


@dataclass(frozen=True)
class Truncate:
    """The last file, by name, that a pattern matches, cut to a part of its length."""

    files: str
    to: float = 0.5

    def strike(self, scene: Scene) -> None:
        for file in _last(self.files):
            os.truncate(file, int(self.to * file.stat().st_size))


@dataclass(frozen=True)
class Remove:
    """The last file or folder, by name, that a pattern matches, removed with all in it."""

    files: str

    def strike(self, scene: Scene) -> None:
        for path in _last(self.files):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@dataclass(frozen=True)
class Poison:
    """NaN in the last element of this rank's weights, or of its part of the state, at a `step`."""

    of: Memory = "weights"

    def strike(self, scene: Scene) -> None:
        scene.memory[self.of].fill_(torch.nan)


@dataclass(frozen=True)
class Flip:
    """One bit, the lowest where it is 0, of the last element of this rank's weights or its part of
    the state, at a `step`: a silent fault of memory."""

    bit: int = 0
    of: Memory = "weights"

    def strike(self, scene: Scene) -> None:
        element = scene.memory[self.of]
        whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[element.element_size()]
        element.view(whole).bitwise_xor_(1 << self.bit)


def _last(pattern: str) -> list[Path]:
    """The last match in the working directory, of files that hold something; none if there is
    none.
    """
    matches = (
        path for path in sorted(Path().glob(pattern)) if path.is_dir() or path.stat().st_size
    )
    return [*matches][-1:]
