"""A save that is killed, at every write, fsync, rename and removal: what was whole stays, or the new one is."""

import os
import shutil
import signal
import socket
from itertools import count
from math import prod
from multiprocessing import get_context
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
import torch.distributed as dist

from helpers.forked_ranks import HANGS
from helpers.small_state import made
from scalec.runtime import TrainState
from scalec.runtime.checkpoint import saver
from scalec.runtime.checkpoint.background import Saver
from scalec.runtime.checkpoint.files import Disk
from scalec.runtime.checkpoint.saver import Keep
from scalec.runtime.comm.store import part

NEW = 3
Axes = dict[str, int]


class _Mortal(Disk):
    """Ends its process before call number `last`; a write leaves half of what it was given."""

    def __init__(self, last: int) -> None:
        self.calls, self.last = 0, last

    def _step(self) -> None:
        if self.calls == self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        self.calls += 1

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        if self.calls == self.last:
            super().write(file, data[: len(data) // 2])
            file.flush()
        self._step()
        super().write(file, data)
        file.flush()

    def sync(self, descriptor: int) -> None:
        self._step()
        super().sync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        self._step()
        super().rename(old, new)

    def remove(self, folder: Path) -> None:
        if self.calls == self.last:
            next(file for file in folder.iterdir()).unlink()
        self._step()
        super().remove(folder)


def _save(folder: Path, axes: Axes, rank: int, port: int, disk: Disk, beside: bool) -> None:
    """In a forked process: what may not come to its end."""
    torch.set_num_threads(1)
    os.close(2)  # what a rank says that has lost its peer
    try:
        if (world := prod(axes.values())) > 1:
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
        state = made(axes, seed=NEW)
        if beside:
            thread = Saver(folder, state, {}, Keep(), disk=disk)
            thread.begin(NEW)
            state.initialise(0)  # which the copy does not see
            thread.wait()
        else:
            saver.save(folder, NEW, state, disk)
        part()
        os._exit(0)
    finally:
        os._exit(1)


def _ended(folder: Path, axes: Axes, victim: int, last: int, beside: bool) -> int | None:
    """How the victim ended."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    context = get_context("fork")
    disks = [_Mortal(last) if rank == victim else Disk() for rank in range(prod(axes.values()))]
    ranks = [
        context.Process(target=_save, args=(folder, axes, rank, port, disk, beside)) for rank, disk in enumerate(disks)
    ]
    for rank in ranks:
        rank.start()
    ranks[victim].join(HANGS)
    for rank in ranks:
        if ranks[victim].exitcode == 0:
            rank.join(HANGS)
        rank.kill()  # it would wait for the victim
        rank.join()
    return ranks[victim].exitcode


def _loaded(path: Path) -> TrainState:
    state = made({}, seed=NEW + 1)
    saver.load(path, state)
    return state


def _same(ours: TrainState, theirs: TrainState) -> bool:
    mine, others = ours.state_dict(), theirs.state_dict()
    return all(torch.equal(mine[key], others[key]) for key in others)


@pytest.mark.sample(2)
@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize(("axes", "victim"), [({}, 0), ({"tp": 2}, 0), ({"tp": 2}, 1)])
def test_a_save_killed_anywhere_leaves_the_old_or_the_new_state(
    tmp_path: Path, axes: Axes, victim: int, beside: bool
) -> None:
    """Beside training or not."""
    states = [made({}, seed=steps) for steps in range(NEW + 1)]
    for steps in range(NEW):
        saver.save(tmp_path / "before", steps, states[steps])
    newest = list[int]()
    for last in count():
        folder = shutil.copytree(tmp_path / "before", tmp_path / str(last))
        status = _ended(folder, axes, victim, last, beside)
        path = saver.newest(folder)
        assert path is not None
        newest.append(saver.finished_steps(path))
        assert _same(_loaded(path), states[newest[-1]])
        if status == 0:
            break
        assert status == -signal.SIGKILL
        saver.save(folder, NEW + 1, states[0])
        assert sorted(each.name for each in folder.iterdir()) == [path.name, f"step-{NEW + 1:06d}"]
    assert newest == sorted(newest)
    assert {*newest} == {NEW - 1, NEW}
    assert len(newest) > (15 if victim == 0 else 10)
