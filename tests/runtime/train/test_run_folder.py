"""The folder of a run is held by one run, and is the same on all nodes."""

import errno
import fcntl
import json
import os
import re
import signal
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest
import torch.distributed as dist

from helpers.bigram import PLAN
from helpers.forked_ranks import HANGS, run_ranks
from scalec.runtime import RunError
from scalec.runtime.train import run_folder
from scalec.runtime.train.run_folder import CLAIM, LOCK, Lock, take


def _hold(folder: Path, taken: Any, job: str) -> None:
    held = Lock(folder, job)
    taken.send(os.getpid())
    signal.pause()
    del held


def _holder(folder: Path, job: str = "") -> tuple[Any, int]:
    """Another process that holds a folder."""
    here, there = get_context("fork").Pipe()
    process = get_context("fork").Process(target=_hold, args=(folder, there, job), daemon=True)
    process.start()
    return process, here.recv()


def test_a_second_run_is_told_who_has_the_folder(tmp_path: Path) -> None:
    process, number = _holder(tmp_path)
    with pytest.raises(RunError) as refused:
        Lock(tmp_path, "")
    who = rf"process {number} on {gethostname()} since 2\d{{3}}-\d\d-\d\d [\d:]+ .\d+\n"
    assert re.match(f"another run has the folder {tmp_path}: {who}", str(refused.value))
    process.kill()
    process.join(HANGS)
    assert Lock(tmp_path, "").is_taken, "a lock of a process that was killed is free"
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_a_later_start_of_the_same_job_waits_for_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, _ = _holder(tmp_path, "job")
    with pytest.raises(RunError):
        Lock(tmp_path, "other job")
    later = Lock(tmp_path, "job")
    assert not later.is_taken
    process.kill()
    later.wait()
    assert later.is_taken
    monkeypatch.setattr(run_folder, "_PATIENCE", 0.0)
    again = Lock(tmp_path, "job")
    again.wait()
    assert not again.is_taken, "which goes on without: the claim ends the earlier one"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_is_said(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert "has no locks" in Lock(tmp_path, "").warning


def _node(folders: list[Path], words: Callable[[], None]) -> str:
    """The error of a rank, which is alone on its node and sees a folder of its own under the
    same name.
    """
    words()
    os.environ.update(
        RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()), LOCAL_RANK="0"
    )
    try:
        take(folders[dist.get_rank()], PLAN)
    except RunError as error:
        return str(error)
    return ""


def _impatient() -> None:
    run_folder._PATIENCE = 0.3  # pyright: ignore[reportPrivateUsage]


def test_folders_that_are_not_shared_are_found(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert run_ranks(3, _node, [one, one, one], _impatient) == [""] * 3
    (told,) = {*run_ranks(3, _node, [one, one, two], _impatient)}
    assert told.startswith(
        f"rank 2 on {gethostname()} does not see what rank 0 has written to {two}: --out has"
        " to name"
    )
    assert (two.exists(), (two / CLAIM).exists()) == (True, False)


def test_a_folder_that_one_node_cannot_write_to_is_found(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    two.mkdir()
    (two / ".probe-1").mkdir()  # as root may write to any other
    (told,) = {*run_ranks(2, _node, [one, two], _impatient)}
    assert told == f"rank 1 on {gethostname()} cannot write to {two}: Is a directory"
