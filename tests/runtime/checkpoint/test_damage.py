"""Checkpoints that are not what was written: one line with file and key, on all ranks, and
nothing is loaded.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor  # seconds: once, before ranks are forked
from torch import Tensor

from helpers.checkpoint_index import change_index
from helpers.forked_ranks import run_ranks
from helpers.small_state import made, whole
from scalec.runtime import RunError
from scalec.runtime.checkpoint import index, saver
from scalec.runtime.checkpoint.files import Disk

STEP = "step-000003"
TP = {"dp": 1, "tp": 2}


def _save(folder: Path) -> None:
    saver.save(folder, 3, made(TP, seed=0))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that two ranks wrote."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(2, _save, folder)
    return folder / STEP


def _payload(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / "rank-00001.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return damage


def _index(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """An index whose hash is right though its content is not, as of a program with a mistake."""

    def damage(folder: Path) -> None:
        change_index(folder / "index.json", change)

    return damage


def _head(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """An index with another format, version or hash."""

    def damage(folder: Path) -> None:
        file = folder / "index.json"
        index = json.loads(file.read_text())
        change(index)
        file.write_text(json.dumps(index) + "\n")

    return damage


def _without_hash(index: Any) -> None:
    """As version 1 of the format was written."""
    index["version"] = 1
    index.pop("blake2b")


def _boxes(index: Any, key: str = "up") -> Any:
    return index["tensors"][key]["boxes"]


def _as_before(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"\x80\x04")


NOT_OURS = "/index.json is damaged, or no index of a checkpoint"
FIRST, SECOND = "/rank-00000.safetensors", "/rank-00001.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "bit": (
        _payload(lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]),
        SECOND + " is not what was written: its",
    ),
    "length": (
        _payload(lambda data: bytes([data[0] ^ 1]) + data[1:]),
        SECOND + " is not what was written: its hash differs",
    ),
    "cut": (_payload(lambda data: data[:100]), SECOND + " has 100 bytes, but "),
    "file": (
        lambda folder: (folder / "rank-00001.safetensors").unlink(),
        SECOND + ": No such file or directory",
    ),
    "no_index": (
        lambda folder: (folder / "index.json").unlink(),
        "/index.json: No such file or directory",
    ),
    "half_an_index": (lambda folder: (folder / "index.json").write_text("{"), NOT_OURS),
    "no_text": (lambda folder: (folder / "index.json").write_bytes(b"\xff"), NOT_OURS),
    "deep": (lambda folder: (folder / "index.json").write_text("[" * 100_000), NOT_OURS),
    "format": (_head(lambda index: index.update(format="other")), NOT_OURS),
    "step_text": (_index(lambda index: index.update(step="3")), NOT_OURS),
    "negative": (_index(lambda index: _boxes(index)[0].update(offset=[-1, 0])), NOT_OURS),
    "elsewhere": (_index(lambda index: _boxes(index)[0].update(file="../secret")), NOT_OURS),
    "version": (
        _head(lambda index: index.update(version=3)),
        "/index.json has format version 3; this program reads 1 and 2",
    ),
    "former version, with a hash": (_head(lambda index: index.update(version=1)), NOT_OURS),
    "no hash": (_head(lambda index: index.pop("blake2b")), NOT_OURS),
    "other spaces": (
        lambda folder: _respaced(folder / "index.json"),
        NOT_OURS,
    ),
    "renamed": (
        _index(lambda index: index.update(step=4)),
        f"/{STEP} holds step 4: it was saved as step-000004",
    ),
    "missing": (_index(lambda index: index["tensors"].pop("up")), f"/{STEP} lacks `up`"),
    "extra": (
        _index(lambda index: index["tensors"].update(bias=index["tensors"]["up"])),
        f"/{STEP} has `bias`, which the plan has not",
    ),
    "shape": (
        _index(lambda index: index["tensors"]["up"].update(shape=[12, 9])),
        f"/{STEP}: `up` is float32 [12, 9], but the plan's is float32 [12, 8]",
    ),
    "dtype": (
        _index(lambda index: index["tensors"]["up"].update(dtype="BF16")),
        f"/{STEP}: `up` is bfloat16 [12, 8], but the plan's is float32 [12, 8]",
    ),
    "gap": (
        _index(lambda index: _boxes(index).pop()),
        "/index.json: `up`: 48 of its 96 elements are in no part",
    ),
    "overlap": (
        _index(lambda index: _boxes(index)[1].update(offset=[5, 0])),
        "/index.json: `up`: its parts [0:6, 0:8] and [5:11, 0:8] overlap",
    ),
    "outside": (
        _index(lambda index: _boxes(index)[1].update(offset=[7, 0])),
        "/index.json: `up`: its part [7:13, 0:8] lies outside of [12, 8]",
    ),
    "dims": (
        _index(lambda index: _boxes(index)[1].update(size=[6])),
        NOT_OURS,
    ),
    "name": (
        _index(lambda index: _boxes(index)[1].update(name="down[0:8, 6:12]")),
        SECOND + " has no `down[0:8, 6:12]` that is float32 [6, 8], though index.json says so",
    ),
    "run": (_index(lambda index: index.update(run=["seed"])), NOT_OURS),
    "settings of a run": (_index(lambda index: index.update(run={"seed": {}})), NOT_OURS),
    "batch of a run": (_index(lambda index: index.update(run={"global_batch": "many"})), NOT_OURS),
    "former": (_as_before, f"/{STEP} is of torch.distributed.checkpoint: `scalec convert PLAN "),
}


def _respaced(file: Path) -> None:
    """The same JSON, but for a space."""
    file.write_bytes(file.read_bytes().rstrip() + b" \n")


def test_a_byte_that_differs_anywhere_in_the_index_is_found(saved: Path) -> None:
    """All bytes, each in three ways: a bit, its case, a digit."""
    data = (saved / "index.json").read_bytes()
    for place, byte in enumerate(data):
        for other in {byte ^ 1, byte ^ 32, ord("1")} - {byte}:
            with pytest.raises(RunError):
                index.parse(data[:place] + bytes([other]) + data[place + 1 :])


def test_an_index_of_the_former_version_is_read(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / STEP)
    _head(_without_hash)(folder)
    former, now = made({}, seed=1), made({}, seed=2)
    saver.load(folder, former)
    saver.load(saved, now)
    assert _same(whole(former), whole(now))


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_one_line_and_nothing_is_loaded(
    saved: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    folder = shutil.copytree(saved, tmp_path / STEP)
    damage(folder)
    state = made({}, seed=1)
    before = whole(state)
    with pytest.raises(RunError) as caught:
        saver.load(folder, state)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert _same(whole(state), before)


def _same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def _load(folder: Path) -> tuple[str, bool]:
    """The message, and whether all is as it was."""
    state = made(TP, seed=1)
    before = whole(state)
    try:
        saver.load(folder, state)
    except RunError as error:
        return str(error), _same(whole(state), before)
    return "", False


def test_what_one_rank_cannot_read_no_rank_loads(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / STEP)
    file = folder / "rank-00001.safetensors"  # rank 1's shards: rank 0 does not need it
    file.write_bytes(file.read_bytes()[::-1])
    first, second = run_ranks(2, _load, folder, functional=True)
    assert first == second == (f"{file} is not what was written: its hash differs", True)


class _Full(Disk):
    """One on which nothing has space."""

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        raise OSError(28, "No space left on device", file.name)


def _save_twice(folder: Path) -> str:
    state = made(TP, seed=0)
    try:
        saver.save(folder, 3, state, _Full() if dist.get_rank() == 1 else Disk())
    except RunError as error:
        saver.save(folder, 3, state)
        return str(error)
    return ""


def test_a_full_disk_of_one_rank_is_one_line_on_all_and_the_next_save_clears_up(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(2, _save_twice, tmp_path)
    assert first == second
    assert "No space left on device" in first
    assert "step-000003.tmp/rank-00001.safetensors" in first
    assert [path.name for path in tmp_path.iterdir()] == [STEP]
