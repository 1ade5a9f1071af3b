"""The limit on a loss, against the rule in plain Python, and over a checkpoint."""

from collections import deque
from pathlib import Path
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.small_state import made
from scalec.runtime.checkpoint.saver import load, save
from scalec.runtime.state.engine import TrainState
from scalec.runtime.state.skips import Losses

LEAST, WINDOW = Losses.LEAST, Losses.WINDOW

VALUES = st.floats(0.5, 4.0, width=32)
YES = torch.tensor(True)


def _limit(losses: deque[float], deviations: float) -> float:
    if len(losses) < LEAST:
        return float("inf")
    middle = median(losses)
    spread = max(median(abs(each - middle) for each in losses), 1e-3 * abs(middle))
    return middle + deviations * spread


def _added(held: Losses, losses: list[float]) -> Losses:
    for loss in losses:
        held.add(torch.tensor(loss), YES)
    return held


@given(st.lists(VALUES, max_size=WINDOW + LEAST), st.floats(0.5, 100.0))
def test_it_is_the_median_and_so_many_median_deviations(
    losses: list[float], deviations: float
) -> None:
    held = _added(Losses(torch.device("cpu")), losses)
    assert float(held.limit(deviations)) == pytest.approx(
        _limit(deque(losses, WINDOW), deviations), rel=1e-5
    )


@pytest.mark.parametrize(("loss", "counts"), [(torch.nan, True), (torch.inf, True), (5.0, False)])
def test_what_is_not_finite_or_does_not_count_changes_nothing(loss: float, counts: bool) -> None:
    held = _added(Losses(torch.device("cpu")), [1.0 + step / 100 for step in range(LEAST)])
    before = held.limit(10.0)
    held.add(torch.tensor(loss), torch.tensor(counts))
    assert torch.equal(held.limit(10.0), before)


def _watching() -> TrainState:
    state = made({"dp": 1}, 0)
    state.replicated_values += [
        *state.losses.get_checkpoint_values(),
        *state.hold.get_checkpoint_values(),
    ]
    return state


def _next_limit(state: TrainState) -> float:
    _added(state.losses, [2.0])
    return float(state.loss_limit(10.0))


def test_it_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """The window is full and half of it is new; a state that keeps none takes the checkpoint
    too, and the reverse.
    """
    state, other, without = _watching(), _watching(), made({"dp": 1}, 1)
    _added(state.losses, [1.0 + step / 7 for step in range(WINDOW + WINDOW // 2)])
    load(save(tmp_path, 1, state), other)
    assert _next_limit(other) == _next_limit(state)
    load(tmp_path / "step-000001", without)
    fresh = _watching()
    load(save(tmp_path / "plain", 1, without), fresh)
    assert _next_limit(fresh) == torch.inf
