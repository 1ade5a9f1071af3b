"""Checkpoints: loadable on any mesh, bit for bit, the newest two, and by no way through pickle."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.tensor  # seconds: once, before ranks are forked
from safetensors.torch import load_file
from torch import Tensor

from helpers.forked_ranks import HANGS, run_ranks
from helpers.small_state import SPLITS, made, modelled, update, whole
from scalec.runtime import RunError, TrainState
from scalec.runtime.checkpoint import saver
from scalec.runtime.state.shards import Box

Axes = dict[str, int]


class _Rows(TrainState):
    """As under ZeRO: where dp does not split a parameter, each of its ranks has some rows of
    it, unevenly, or none.
    """

    def boxes(self) -> Iterator[Box]:
        for box in super().boxes():
            split = {
                axis for axes in SPLITS.get(box.key.split("/")[-1], {}).values() for axis in axes
            }
            if box.tensor.dim() and "dp" not in split:
                rows = self._rows(len(box.tensor), box.key)
                offset = (box.offset[0] + rows.start, *box.offset[1:])
                own = "tp" in split or self.mesh.rank("tp") == 0
                box = replace(box, offset=offset, tensor=box.tensor[rows], is_own=own)
            yield box

    def _rows(self, count: int, key: str) -> slice:
        rank, size = self.mesh.rank("dp"), self.mesh.size("dp")
        if key == "norm":
            return slice(0, count) if rank == size - 1 else slice(0, 0)
        start, stop = ((part and count * (size + part) // (2 * size)) for part in (rank, rank + 1))
        return slice(start, stop)


def _save(
    folder: Path,
    axes: Axes,
    kind: type[TrainState] = TrainState,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    state = made(axes, 0, kind, dtype)
    for step in range(3):
        update(state, step)
    saver.save(folder, 3, state)
    return whole(state)


def _load(folder: Path, axes: Axes) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state as loaded, and one step further."""
    state = made(axes, seed=1)
    path = saver.newest(folder)
    assert path is not None
    saver.load(path, state)
    loaded = whole(state)
    update(state, saver.get_finished_steps(path))
    return loaded, whole(state)


def _handed_on(old: Path, new: Path, axes: Axes, kind: type[TrainState]) -> None:
    state = made(axes, 1, kind)
    saver.load(old / "step-000003", state)
    saver.save(new, 3, state)


def test_a_checkpoint_of_any_mesh_loads_on_any_other(tmp_path: Path) -> None:
    saved = run_ranks(4, _save, tmp_path, {"dp": 2, "tp": 2}, functional=True)[0]
    assert saved["optimizer/step"] == 3
    assert saved["up"].shape == (12, 8)
    alone, further = _load(tmp_path, {"dp": 1, "tp": 1})
    elsewhere = [
        *run_ranks(4, _load, tmp_path, {"dp": 4}, functional=True),
        *run_ranks(2, _load, tmp_path, {"tp": 2, "dp": 1}, functional=True),
    ]
    for key, value in saved.items():
        assert torch.equal(alone[key], value), key
        assert all(torch.equal(loaded[key], value) for loaded, _ in elsewhere), key
        assert all(torch.equal(after[key], further[key]) for _, after in elsewhere), key
    assert not torch.equal(further["up"], alone["up"])


def test_from_mesh_to_mesh_the_bits_stay(tmp_path: Path) -> None:
    """Each saves what it loaded from the one before; some hold only rows of a parameter."""
    saved = run_ranks(4, _save, tmp_path / "0", {"dp": 2, "tp": 2}, functional=True)[0]
    run_ranks(4, _handed_on, tmp_path / "0", tmp_path / "1", {"dp": 2, "tp": 2}, _Rows)
    _handed_on(tmp_path / "1", tmp_path / "2", {"dp": 1, "tp": 1}, TrainState)
    run_ranks(4, _handed_on, tmp_path / "2", tmp_path / "3", {"dp": 1, "tp": 4}, TrainState)
    run_ranks(4, _handed_on, tmp_path / "3", tmp_path / "4", {"dp": 4, "tp": 1}, _Rows)
    loaded, _ = _load(tmp_path / "4", {"dp": 1, "tp": 1})
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)


def test_each_box_is_written_once_and_a_rank_without_any_writes_no_file(tmp_path: Path) -> None:
    run_ranks(4, _save, tmp_path, {"dp": 2, "tp": 2}, _Rows, functional=True)
    folder = tmp_path / "step-000003"
    index = json.loads((folder / "index.json").read_text())
    assert sorted(path.name for path in folder.iterdir()) == ["index.json", *sorted(index["files"])]
    files = {name: load_file(folder / name) for name in index["files"]}  # others read them too
    boxes = [
        (box["file"], box["name"]) for each in index["tensors"].values() for box in each["boxes"]
    ]
    assert sorted(boxes) == sorted(
        (file, name) for file, tensors in files.items() for name in tensors
    )
    assert index["tensors"]["norm"]["boxes"] == [
        {"offset": [0], "size": [8], "file": "rank-00002.safetensors", "name": "norm"}
    ]
    assert "up[4:6, 0:8]" not in files["rank-00000.safetensors"]
    run_ranks(4, _save, tmp_path / "copies", {"dp": 4}, functional=True)
    # its share of `both`
    assert len(load_file(tmp_path / "copies" / "step-000003" / "rank-00003.safetensors")) == 3


def test_masters_are_saved_and_working_copies_made_of_them(tmp_path: Path) -> None:
    saved = _save(tmp_path, {"dp": 1}, dtype=torch.bfloat16)
    assert {value.dtype for value in saved.values()} == {torch.float32}
    assert not torch.equal(saved["up"], saved["up"].bfloat16().float())
    model, state = modelled({"dp": 1}, 1, dtype=torch.bfloat16)
    saver.load(tmp_path / "step-000003", state)
    assert all(
        torch.equal(parameter, saved[name].bfloat16())
        for name, parameter in model.named_parameters()
    )
    loaded, _ = _load(tmp_path, {"dp": 1})
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path: Path) -> None:
    state = made({"dp": 1}, seed=0)
    for step in range(4):
        if step == 3:
            saver.save(tmp_path, step, state)
        update(state, step)
    _, resumed = _load(tmp_path, {"dp": 1})
    assert all(torch.equal(resumed[key], value) for key, value in whole(state).items())


def test_the_newest_two_are_kept_and_none_is_written_over(tmp_path: Path) -> None:
    state = made({}, seed=0)
    assert saver.newest(tmp_path) is None
    for step in (9, 999_999, 1_000_000):
        saver.save(tmp_path, step, state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1000000", "step-999999"]
    with pytest.raises(RunError, match="step-1000000 is there already"):
        saver.save(tmp_path, 1_000_000, state)


def test_nothing_slow_is_imported(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from helpers.small_state import made
from scalec.runtime.checkpoint import saver
state = made({{"dp": 1}}, 0)
saver.load(saver.save(Path({str(tmp_path)!r}), 1, state), state)
slow = ["torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor"]
print([name for name in slow if name in sys.modules])
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd="tests", capture_output=True, text=True, timeout=HANGS, check=True
    )
    assert done.stdout == "[]\n"
