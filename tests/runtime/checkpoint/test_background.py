"""Saves beside training: what is saved is the state when the save began, and a disk that
refuses costs no run.
"""

import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from helpers.forked_ranks import run_ranks
from helpers.small_state import made
from scalec.runtime import TrainState
from scalec.runtime.checkpoint import background, host_copy, saver, tensor_file
from scalec.runtime.checkpoint.background import Saver
from scalec.runtime.checkpoint.files import Disk
from scalec.runtime.checkpoint.saver import Keep, newest_whole
from scalec.runtime.checkpoint.tensor_file import Stamp
from scalec.runtime.errors import RunError
from scalec.runtime.state.shards import Box

TP = {"tp": 2}
TRIES = len(background.PAUSES) + 1


@given(st.sets(st.integers(1, 60), min_size=1), st.integers(1, 4), st.integers(0, 7))
def test_the_newest_are_kept_and_those_of_each_kth_step(
    steps: set[int], newest: int, every: int
) -> None:
    paths = [Path(f"step-{step:06d}") for step in sorted(steps)]
    left = [path for path in paths if path not in Keep(newest, every).find_old(paths)]
    assert left[-newest:] == paths[-newest:]
    assert [*map(saver.get_finished_steps, left[:-newest])] == [
        step for step in sorted(steps)[:-newest] if every and step % every == 0
    ]


class _Held(Disk):
    """Writes nothing before it may."""

    def __init__(self) -> None:
        self.may, self.calls = Event(), 0

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        self.calls += 1
        self.may.wait()
        super().write(file, data)


def test_training_goes_on_while_the_copy_is_written(tmp_path: Path) -> None:
    state, disk = made({}, seed=1), _Held()
    before = {key: value.clone() for key, value in state.state_dict().items()}
    beside = Saver(tmp_path, state, {"seed": 1}, Keep(), disk=disk)
    beside.begin(3)
    state.initialise(2)
    assert saver.newest(tmp_path) is None
    disk.may.set()
    beside.wait()
    size = sum(value.nbytes for value in before.values())
    assert beside.newest == tmp_path / "step-000003"
    assert beside.news() == [
        f"saves keep a copy of this rank's state in host memory, {size / 2**20:,.2f} MiB"
    ]
    loaded = made({}, seed=5)
    saver.load(beside.newest, loaded)
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in before.items())


def _without_room(folder: Path, free: int) -> tuple[list[str], int, bool]:
    """A save on a node with so much memory left: lines, the state's bytes, and whether training
    has waited for it.
    """
    state = made(TP, seed=1)
    host_copy.free_memory = lambda: free  # in a forked process
    beside = Saver(folder, state, {}, Keep())
    beside.begin(1)
    waited = saver.newest(folder) is not None
    beside.wait()
    return beside.news(), sum(box.tensor.nbytes for box in state.boxes() if box.is_own), waited


def test_without_memory_for_the_copies_of_a_node_training_waits(tmp_path: Path) -> None:
    """Each rank alone would have room."""
    size = sum(each[1] for each in run_ranks(2, _without_room, tmp_path / "a", 1 << 40))
    found = run_ranks(2, _without_room, tmp_path / "b", size)
    node = socket.gethostname()
    line = (
        "training waits for each save, since it cannot be copied: {} has 0.0 GiB of memory"
        " left, copies take 0.0 GiB"
    )
    assert [(lines, waited) for lines, _, waited in found] == [([line.format(node)], True)] * 2


class _Cuda:
    """Pins nothing, and gives the error to what is called next, as CUDA does."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self) -> None:
        self.left = 0

    def cudaHostRegister(self, *_: int) -> int:
        self.left = 2
        return self.left

    def cudaGetErrorString(self, error: int) -> str:
        return {2: "out of memory"}[error]

    def next(self, *_: object, **__: object) -> None:
        error, self.left = self.left, 0
        if error:
            raise RuntimeError(error)


def test_memory_that_cuda_does_not_pin_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the error reaches no later kernel."""
    cuda = _Cuda()
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "cudart", lambda: cuda)
        patched.setattr(torch, "zeros", cuda.next)
        fault = host_copy.pin(torch.empty(4))
    assert (fault, cuda.left) == ("out of memory", 0)

    def host_memory(own: Mapping[str, Box]) -> tuple[dict[str, torch.Tensor], str]:
        return host_copy.host_memory(own)[0], fault

    monkeypatch.setattr(background, "host_memory", host_memory)
    beside = Saver(tmp_path, made({}, seed=1), {}, Keep())
    beside.begin(1)
    beside.wait()
    assert beside.news()[1:] == [
        "this copy takes longer, since CUDA does not pin its memory: out of memory"
    ]


class _Full(Disk):
    """Refuses its first calls."""

    def __init__(self, refusals: int) -> None:
        self.left = refusals

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        if self.left:
            self.left -= 1
            raise OSError(28, "No space left on device", file.name)
        super().write(file, data)


def _fails(do: Callable[[], object]) -> str:
    try:
        do()
    except RunError as error:
        return str(error)
    return ""


def _saved(folder: Path, refusals: int) -> tuple[list[str], str, list[str]]:
    """Two saves, the first on a disk that is full on rank 1."""
    background.PAUSES = (0.0, 0.0)  # in a forked process
    disk = _Full(refusals if dist.get_rank() == 1 else 0)
    beside = Saver(folder, made(TP, seed=1), {}, Keep(), disk=disk)
    beside.begin(1)
    beside.wait()
    (_, *lines), failed = beside.news(), _fails(beside.require)
    beside.begin(2)
    beside.wait()
    beside.require()
    return lines, failed, sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("refusals", "left"), [(1, ["step-000001", "step-000002"]), (TRIES, ["step-000002"])]
)
def test_a_full_disk_is_told_with_its_rank_and_tried_anew(
    tmp_path: Path, refusals: int, left: list[str]
) -> None:
    found = run_ranks(2, _saved, tmp_path, refusals)
    lines, failed, names = found[0]
    assert found[1] == found[0]
    assert names == left
    assert failed == (
        "the last save has failed, and there is no checkpoint" if refusals == TRIES else ""
    )
    why = (
        f"cannot save step 1: rank 1: {tmp_path}/step-000001.tmp/rank-00001.safetensors: No"
        " space left on device"
    )
    assert lines == [f"{why}; {then}" for then in ["trying again in 0 s"] * min(refusals, 2)] + [
        f"{why}; given up until the next save is due"
    ] * bool(failed)


def _one_rank_is_not_finite(folder: Path) -> tuple[str, list[str]]:
    """A good save, and one of a state of which rank 1 has a NaN."""
    state = made(TP, seed=1)
    beside = Saver(folder, state, {}, Keep())
    beside.begin(1)
    beside.wait()
    if dist.get_rank() == 1:
        next(box.tensor for box in state.boxes() if box.key == "optimizer/exp_avg/up").view(-1)[
            -1
        ] = torch.nan
    beside.begin(2)
    beside.wait()
    return _fails(beside.check), sorted(path.name for path in folder.iterdir())


def test_a_state_that_is_not_finite_is_not_saved_by_any_rank(tmp_path: Path) -> None:
    why = (
        "step 2 is not saved, since `optimizer/exp_avg/up[6:12, 0:8]` is not finite; try a"
        " lower --lr"
    )
    assert run_ranks(2, _one_rank_is_not_finite, tmp_path) == [(why, ["step-000001"])] * 2


class _Stuck(Disk):
    """Removes nothing."""

    def remove(self, folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))


def test_an_old_checkpoint_that_stays_costs_no_save(tmp_path: Path) -> None:
    beside = Saver(tmp_path, made({}, seed=1), {}, Keep(1), disk=_Stuck())
    for step in (1, 2):
        beside.begin(step)
    beside.wait()
    beside.require()
    assert beside.newest == tmp_path / "step-000002"
    assert beside.news()[1:] == [
        f"cannot remove an old checkpoint: {tmp_path}/step-000001.tmp: Permission denied"
    ]


class _Mistaken(Disk):
    """One whose code has a bug."""

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        raise ZeroDivisionError


def test_a_bug_in_the_thread_fails_the_run(tmp_path: Path) -> None:
    beside = Saver(tmp_path, made({}, seed=1), {}, Keep(), disk=_Mistaken())
    beside.begin(1)
    with pytest.raises(ZeroDivisionError):
        beside.wait()


def _damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _whole(folder: Path) -> Any:
    try:
        found, notes = newest_whole(folder)
    except RunError as error:
        return str(error)
    return str(found), notes


def _hashed(folder: Path) -> tuple[list[str], bool]:
    """The files that this rank hashes where it looks for the newest whole checkpoint and loads
    it on another mesh.
    """
    hashed, read = list[str](), tensor_file.read

    def counted(path: Path, stamp: Stamp, hashes: bool = True) -> dict[str, torch.Tensor]:
        hashed.extend([path.name] * hashes)
        return read(path, stamp, hashes)

    tensor_file.read = counted  # in a forked process
    found, _ = newest_whole(folder)
    assert found
    state = made({"dp": 2}, seed=5)
    saver.load(found, state)
    return hashed, not found.tensors()


def test_each_file_is_hashed_once_by_one_rank(tmp_path: Path) -> None:
    run_ranks(2, _three, tmp_path)
    assert run_ranks(2, _hashed, tmp_path) == [
        ([f"rank-0000{rank}.safetensors"], True) for rank in range(2)
    ]


def _three(folder: Path) -> None:
    state: TrainState = made(TP, seed=1)
    for step in (1, 2, 3):
        saver.write(folder, step, saver.own_boxes(state), {}, Disk())


def test_a_run_falls_back_to_the_newest_that_is_whole(tmp_path: Path) -> None:
    """Damage that only one rank has read is known to both."""
    run_ranks(2, _three, tmp_path)
    assert run_ranks(2, _whole, tmp_path) == [(str(tmp_path / "step-000003"), [])] * 2
    _damage(tmp_path / "step-000003" / "rank-00001.safetensors")
    shutil.rmtree(tmp_path / "step-000002" / "rank-00000.safetensors", ignore_errors=True)
    (tmp_path / "step-000002" / "index.json").write_text("{")
    notes = [
        f"{tmp_path}/step-000003 is damaged: {tmp_path}/step-000003/rank-00001.safetensors is"
        " not what was written:"
        " its hash differs",
        f"{tmp_path}/step-000002 is damaged: {tmp_path}/step-000002/index.json is damaged, or"
        " no index of a checkpoint",
    ]
    assert run_ranks(2, _whole, tmp_path) == [(str(tmp_path / "step-000001"), notes)] * 2
    (tmp_path / "step-000001" / "rank-00000.safetensors").unlink()
    assert run_ranks(2, _whole, tmp_path)[1].startswith(f"no checkpoint in {tmp_path} is whole\n  ")
