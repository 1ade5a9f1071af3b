"""Checkpoints: whole or absent, the newest two, and loadable on any mesh."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ranks import run_ranks
from scalec.runtime import AdamW, Group, Mesh, State, checkpoint, normal, ones, weight

SHAPES = {"norm": (8,), "up": (12, 8), "down": (8, 12), "both": (8, 8)}
SPLITS: dict[str, dict[int, tuple[str, ...]]] = {
    "norm": {},
    "up": {0: ("tp",)},
    "down": {1: ("tp",)},
    "both": {0: ("dp", "tp")},
}


class _Model(nn.Module):
    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            split = {d: tuple(a for a in axes if a in mesh.axes) for d, axes in SPLITS[name].items()}
            self.register_parameter(name, weight(mesh, *shape, split=split, init=ones() if not split else normal(1)))


def _made(axes: dict[str, int], seed: int) -> State:
    mesh = Mesh(axes)
    state = State(_Model(mesh), mesh, {"all": (Group("norm"), Group("up", "down", "both", weight_decay=0.1))}, AdamW())
    state.initialise(seed)
    return state


def _update(state: State, step: int) -> None:
    """A gradient that is a function of the parameter, so that it is the same on every mesh."""
    record = {key: _own(value) for key, value in state.state_dict().items() if "/" not in key}
    for flat in state.gradients().values():
        flat.copy_(torch.cat([record[name].flatten() for name in ("norm", "up", "down", "both")]).cos())
    state.update(0.1, scale=torch.tensor(1.0 / (step + 1)), skip=torch.tensor(False))


def _own(value: Any) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def _whole(state: State) -> dict[str, Tensor]:
    values: dict[str, Any] = state.state_dict()
    return {key: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for key, v in values.items()}


def _save(folder: Path, axes: dict[str, int]) -> dict[str, Tensor]:
    state = _made(axes, seed=0)
    for step in range(3):
        _update(state, step)
    checkpoint.save(folder, 3, state)
    return _whole(state)


def _load(folder: Path, axes: dict[str, int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state as loaded, and one step further."""
    state = _made(axes, seed=1)
    path = checkpoint.newest(folder)
    assert path is not None
    checkpoint.load(path, state)
    loaded = _whole(state)
    _update(state, checkpoint.finished_steps(path))
    return loaded, _whole(state)


def test_a_checkpoint_of_any_mesh_loads_on_any_other(tmp_path: Path) -> None:
    saved = run_ranks(4, _save, tmp_path, {"dp": 2, "tp": 2})[0]
    assert saved["optimizer/step"] == 3
    assert saved["up"].shape == (12, 8)
    alone, further = _load(tmp_path, {"dp": 1, "tp": 1})
    elsewhere = [*run_ranks(4, _load, tmp_path, {"dp": 4}), *run_ranks(2, _load, tmp_path, {"tp": 2, "dp": 1})]
    for key, value in saved.items():
        assert torch.equal(alone[key], value), key
        assert all(torch.equal(loaded[key], value) for loaded, _ in elsewhere), key
        assert all(torch.equal(after[key], further[key]) for _, after in elsewhere), key
    assert not torch.equal(further["up"], alone["up"])


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path: Path) -> None:
    state = _made({"dp": 1}, seed=0)
    for step in range(4):
        if step == 3:
            checkpoint.save(tmp_path, step, state)
        _update(state, step)
    _, resumed = _load(tmp_path, {"dp": 1})
    assert all(torch.equal(resumed[key], value) for key, value in _whole(state).items())


def test_the_newest_two_are_kept_and_a_broken_one_is_never_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = _made({}, seed=0)
    assert checkpoint.newest(tmp_path) is None
    for step in (9, 999_999, 1_000_000):
        checkpoint.save(tmp_path, step, state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1000000", "step-999999"]
    monkeypatch.setattr(State, "state_dict", lambda self: {"w": torch.ones(1), "broken": lambda: None})
    with pytest.raises(BaseException):  # noqa: B017, PT011 (torch's CheckpointException is no Exception)
        checkpoint.save(tmp_path, 2_000_000, state)
    newest = checkpoint.newest(tmp_path)
    assert newest is not None
    assert newest.name == "step-1000000"
    assert (tmp_path / "step-999999").exists()
