"""Nodes of a cluster on this machine: each is a torchrun of its own, which may come and go."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any, cast

import torch.distributed as dist

from helpers.forked_ranks import HANGS

SETTINGS = "last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=4"
"""Seconds in which torchrun waits for more nodes, and after which it takes a silent one to be
lost, much shortened.
"""

HELD = '''"""Runs a program that is held before some steps until a file is gone: `held.py PROGRAM …`."""

import runpy, sys, time
from pathlib import Path
from scalec.runtime import Cosine

lr, begun = Cosine.lr, False

def held(self, step, steps, peak):
    global begun
    while begun and Path(f"hold-{step}").exists():
        time.sleep(0.02)
    begun = True  # the first rate is asked for before any step
    return lr(self, step, steps, peak)

Cosine.lr = held
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
'''


class Nodes:
    """Nodes that run the program in `folder`, from `least` to `most` of them, with `ranks` each."""

    def __init__(self, folder: Path, least: int, most: int, ranks: int, options: str) -> None:
        self.folder = folder
        self._meeting: Any = cast(Any, dist).TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        (folder / "held.py").write_text(HELD)
        launch = (
            f"--nnodes={least}:{most} --max-restarts=5 --nproc-per-node={ranks} --rdzv-backend=c10d"
        )
        meeting = (
            f"--rdzv-endpoint=127.0.0.1:{self._meeting.port} --rdzv-id=test --rdzv-conf={SETTINGS}"
        )
        program = f"held.py train.py --device=cpu --resume auto {options}"
        self._command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *f"{launch} {meeting} {program}".split(),
        ]
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str) -> None:
        """Nodes whose output is in files of their names."""
        environment = os.environ | {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": "1",
        }
        for name in names:
            with (self.folder / name).open("wb") as out:
                self._running[name] = subprocess.Popen(
                    self._command,
                    cwd=self.folder,
                    stdout=out,
                    stderr=out,
                    env=environment,
                    start_new_session=True,
                )

    def kill(self, name: str) -> None:
        """A node is gone with all its processes, and nothing is told to others."""
        node = self._running.pop(name)
        ranks = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
        for process in (node.pid, *map(int, ranks)):
            os.kill(process, signal.SIGKILL)
        node.wait()

    def said(self, words: str, times: int = 1) -> None:
        """Waits until the nodes together have said some words so often."""
        self._until(
            lambda: sum(file.read_text().count(words) for file in self._files()) >= times, words
        )

    def saved(self, step: int) -> None:
        """Waits for a checkpoint."""
        path = self.folder / f"runs/tiny/checkpoints/step-{step:06}"
        self._until(path.exists, path.name)

    def hold(self, step: int) -> Path:
        """Holds the run before a step until the file is removed."""
        file = self.folder / f"hold-{step}"
        file.touch()
        return file

    def ended(self) -> dict[str, int]:
        """The exit statuses of those that have not been killed."""
        return {name: node.wait(HANGS) for name, node in self._running.items()}

    def end(self) -> None:
        """Ends all that is left."""
        for node in self._running.values():
            if node.poll() is None:
                node.terminate()
        for node in self._running.values():
            node.wait(HANGS)

    def _files(self) -> list[Path]:
        return [
            path
            for path in self.folder.iterdir()
            if path.is_file() and not path.suffix and "-" not in path.name
        ]

    def _until(self, met: Any, what: str) -> None:
        limit = monotonic() + HANGS
        while not met():
            lasts = monotonic() < limit and any(
                node.poll() is None for node in self._running.values()
            )
            assert lasts, f"{what}: {[file.read_text()[-2000:] for file in self._files()]}"
            sleep(0.02)


@contextmanager
def nodes(folder: Path, least: int, most: int, ranks: int, options: str) -> Iterator[Nodes]:
    """Nodes that end with the test."""
    made = Nodes(folder, least, most, ranks, options)
    try:
        yield made
    finally:
        made.end()
