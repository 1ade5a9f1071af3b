"""The loss scale against torch's GradScaler, and what a step that overflows leaves of a state."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers.small_log import small_log
from helpers.small_state import made, update
from scalec.runtime import RunError, TrainState
from scalec.runtime.checkpoint import saver
from scalec.runtime.config.plan import Metrics
from scalec.runtime.state.skips import LossScale
from scalec.runtime.train.finite import Finite

FIRST, INTERVAL, MOST, (VALUE, STEPS) = (
    LossScale.FIRST,
    LossScale.INTERVAL,
    LossScale.MOST,
    LossScale.KEYS,
)

update_scale = cast(Any, torch)._amp_update_scale_  # what GradScaler calls
NO, YES = torch.tensor(False), torch.tensor(True)


def get_checkpoint_values(scale: LossScale) -> dict[str, float]:
    return {key: float(value) for key, value in scale.get_checkpoint_values()}


def near_growth(before: int) -> LossScale:
    """So many good steps before it grows."""
    scale = LossScale(torch.device("cpu"))
    dict(scale.get_checkpoint_values())[STEPS].fill_(INTERVAL - before)
    return scale


@given(st.lists(st.booleans(), max_size=20), st.integers(1, 8))
def test_it_is_that_of_torchs_scaler(overflows: list[bool], before: int) -> None:
    scale, tracker = torch.full((), FIRST), torch.full((), INTERVAL - before, dtype=torch.int32)
    own = near_growth(before)
    for overflow in overflows:
        update_scale(scale, tracker, torch.tensor(float(overflow)), 2.0, 0.5, INTERVAL)
        own.update(torch.tensor(overflow), NO)
        assert get_checkpoint_values(own) == {VALUE: float(scale), STEPS: float(tracker)}


def test_a_skipped_step_counts_for_nothing() -> None:
    own = near_growth(1)
    before = get_checkpoint_values(own)
    own.update(NO, YES)
    own.update(YES, YES)
    assert get_checkpoint_values(own) == before
    own.update(NO, NO)
    assert get_checkpoint_values(own) == {VALUE: 2 * FIRST, STEPS: 0}


def test_it_does_not_grow_for_ever() -> None:
    own = LossScale(torch.device("cpu"))
    for _ in range(20):
        dict(own.get_checkpoint_values())[STEPS].fill_(INTERVAL - 1)
        own.update(NO, NO)
    assert float(own.value()) == MOST


def test_a_value_that_was_taken_stays() -> None:
    own = LossScale(torch.device("cpu"))
    taken = own.value()
    own.update(YES, NO)
    assert (float(taken), float(own.value())) == (FIRST, FIRST / 2)


def half(seed: int = 0) -> TrainState:
    return made({"dp": 1}, seed, dtype=torch.float16)


def boxes(state: TrainState) -> dict[str, Tensor]:
    return {box.key: box.tensor.clone() for box in state.boxes()}


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_an_overflow_halves_the_scale_and_changes_nothing_else(value: float) -> None:
    state = half()
    update(state, 0)
    before = boxes(state)
    for flat in state.gradients().values():
        flat.fill_(value)
    state.update(0.1, skip=NO, scale=torch.tensor(torch.nan), overflow=YES)
    after = boxes(state)
    assert float(after.pop(VALUE)) == float(before.pop(VALUE)) / 2
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert not any(flat.any() for flat in state.gradients().values())


def test_only_float16_has_one() -> None:
    state = made({"dp": 1}, 0, dtype=torch.bfloat16)
    assert not {VALUE, STEPS} & boxes(state).keys()
    with pytest.raises(AssertionError, match="only float16"):
        state.loss_scale()
    with pytest.raises(AssertionError, match="only float16"):
        state.update(0.1, skip=NO, overflow=NO)


def _adapted(state: TrainState) -> TrainState:
    for box in state.boxes():
        if box.key in (VALUE, STEPS):
            box.tensor.fill_(8.0)
    return state


def test_a_resumed_run_has_the_scale_that_was_saved(tmp_path: Path) -> None:
    saved = _adapted(half())
    path = saver.save(tmp_path, 1, saved)
    resumed = half(1)
    saver.load(path, resumed)
    own, other = boxes(resumed), boxes(saved)
    assert own.keys() == other.keys()
    assert all(torch.equal(own[key], value) for key, value in other.items())


def test_a_plan_without_a_scale_leaves_it_and_one_with_it_begins_anew(tmp_path: Path) -> None:
    with_scale = saver.save(tmp_path / "with", 1, _adapted(half()))
    wide = made({"dp": 1}, 1)
    saver.load(with_scale, wide)
    without = saver.save(tmp_path / "without", 1, wide)
    again = half(1)
    saver.load(without, again)
    values = boxes(again)
    assert (float(values.pop(VALUE)), float(values.pop(STEPS))) == (FIRST, 0)
    assert all(torch.equal(value, boxes(half())[key]) for key, value in values.items())


def _metrics(scale: float | None, norm: float = torch.inf, loss: float = 5.0) -> Metrics:
    known = None if scale is None else torch.tensor(scale)
    return Metrics(
        loss=torch.tensor(loss), tokens=torch.tensor(4), norm=torch.tensor(norm), loss_scale=known
    )


def test_a_skipped_step_is_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = small_log(tmp_path)
    log.step(1, _metrics(FIRST), 0.1)
    log.step(2, _metrics(FIRST / 2, norm=1.5), 0.1)
    first, second = capsys.readouterr().out.splitlines()
    assert "scale 65536  skipped: its gradients overflow fp16  " in first
    assert "skipped" not in second
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert "norm" not in lines[0]
    assert '"norm": 1.5, "loss_scale": 32768.0' in lines[1]


def test_skipped_steps_without_a_line_of_their_own_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = small_log(tmp_path)
    log.step(1, _metrics(FIRST), 0.1, due=False)
    log.step(2, _metrics(FIRST / 2), 0.1)
    log.step(3, _metrics(FIRST / 4, norm=1.5), 0.1)
    second, third = capsys.readouterr().out.splitlines()
    assert (
        "  skipped: its gradients overflow fp16  1 step before it skipped: fp16 overflow  "
        in second
    )
    assert "skipped" not in third
    assert '"overflowed": 2' in (tmp_path / "log.jsonl").read_text().splitlines()[0]


@pytest.mark.parametrize(
    "metrics", [_metrics(None), _metrics(0.5), _metrics(FIRST, loss=torch.nan)]
)
def test_what_no_scale_would_have_helped_stops_the_run(metrics: Metrics) -> None:
    with pytest.raises(RunError, match="try a lower --lr"):
        Finite(made({}, seed=0)).after(1, metrics)
