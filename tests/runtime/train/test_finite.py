"""Steps whose values are not finite change nothing, and are found on all ranks after the same
step.
"""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers.small_state import made, update
from scalec.runtime.checkpoint.saver import load, save
from scalec.runtime.config.plan import Metrics
from scalec.runtime.errors import RunError
from scalec.runtime.state.engine import TrainState
from scalec.runtime.state.skips import UpdateHold
from scalec.runtime.train.finite import Finite

NO = torch.tensor(False)


def _boxes(state: TrainState) -> dict[str, Tensor]:
    return {box.key: box.tensor.clone() for box in state.boxes()}


def _step(state: TrainState, value: float) -> Metrics:
    """A step whose gradients are all `value`."""
    for flat in state.gradients().values():
        flat.fill_(value)
    loss = torch.tensor(value)
    state.update(0.1, skip=NO, finite=loss.isfinite(), scale=loss)
    return Metrics(loss=loss, tokens=torch.tensor(4), norm=loss)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_such_a_step_and_all_after_it_change_nothing(value: float) -> None:
    state = made({"dp": 1}, 0)
    update(state, 0)
    before = _boxes(state)
    for each in (value, 1.0, 2.0):
        _step(state, each)
        assert all(torch.equal(before[key], now) for key, now in _boxes(state).items())


def test_the_run_ends_at_the_first_step() -> None:
    state = made({"dp": 1}, 0)
    finite = Finite(state)
    assert finite.after(1, _step(state, 1.0)) is None
    with pytest.raises(
        RunError, match="step 2: loss nan, gradient norm nan; no parameter has been updated by it"
    ):
        finite.after(2, _step(state, torch.nan))


def test_with_a_rule_some_in_a_row_are_skipped() -> None:
    state = made({"dp": 1}, 0)
    finite = Finite(state, skips=2)
    for step, value in enumerate((1.0, torch.nan, torch.inf, 1.0, torch.nan, torch.nan), 1):
        before = _boxes(state)
        bad = finite.after(step, _step(state, value))
        assert (bad is None) == (value == 1.0)
        assert (value == 1.0) != all(
            torch.equal(before[key], now) for key, now in _boxes(state).items()
        )
    with pytest.raises(
        RunError, match="step 7: loss inf, gradient norm inf; 2 in a row were skipped"
    ):
        finite.after(7, _step(state, torch.inf))


def test_steps_in_a_row_are_counted_on_over_a_checkpoint(tmp_path: Path) -> None:
    state, other = made({"dp": 1}, 0), made({"dp": 1}, 1)
    first, second = Finite(state, skips=1), Finite(other, skips=1)
    for each in (state, other):
        each.replicated_values += each.hold.get_checkpoint_values()
    assert first.after(1, _step(state, torch.nan))
    load(save(tmp_path, 1, state), other)
    with pytest.raises(
        RunError, match="step 2: loss nan, gradient norm nan; 1 in a row were skipped"
    ):
        second.after(2, _step(other, torch.nan))


def test_a_spike_is_told_by_its_limit_and_skipped_where_the_step_says_so() -> None:
    state = made({"dp": 1}, 0)
    finite, limit = Finite(state, skips=1), torch.tensor(2.0)
    told = finite.after(1, replace(_step(state, 3.0), limit=limit))
    assert str(told) == "step 1: loss 3.0000 is a spike: above 2.0000"
    assert told is not None
    assert not told.row
    assert finite.after(2, replace(_step(state, 2.0), limit=limit)) is None
    for step in (3, 4):
        state.update(0.1, skip=NO, finite=NO)
        with nullcontext() if step == 3 else pytest.raises(RunError, match="step 4: loss 3"):
            finite.after(
                step, Metrics(torch.tensor(3.0), torch.tensor(4), torch.tensor(1.0), limit=limit)
            )


def test_the_step_is_named_though_it_is_seen_later() -> None:
    state = made({"dp": 1}, 0)
    finite = Finite(state, every=4)
    for step, value in enumerate((1.0, torch.nan, 1.0), 1):
        finite.after(step, _step(state, value))
    with pytest.raises(RunError, match="step 2: "):
        finite.after(4, _step(state, 1.0))


@given(st.lists(st.booleans(), max_size=12), st.integers(0, 3))
def test_updates_are_held_after_more_in_a_row_than_may_be(finite: list[bool], most: int) -> None:
    """Against the rule in plain Python."""
    held, row = UpdateHold(torch.device("cpu")), 0
    held.allow(most)
    for each in finite:
        row = 0 if each and row <= most else row + 1
        assert bool(held.after(torch.tensor(each))) == (row > 0)
        assert (int(held.row()), bool(held.holds())) == (row, row > most)
