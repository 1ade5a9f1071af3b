"""Learning rates at the points that matter."""

import pytest

from scalec.runtime import Constant, Cosine


def test_cosine_warms_up_and_ends_at_its_floor() -> None:
    rates = [Cosine(warmup=10, floor=0.2).lr(step, 111, peak=2.0) for step in range(111)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == 2.0
    assert rates[60] == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert rates[110] == 0.2  # of the last step
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_constant_and_runs_shorter_than_their_warm_up() -> None:
    assert [Constant(warmup=2).lr(step, 4, 1.0) for step in range(4)] == [0.5, 1, 1, 1]
    assert Constant().lr(0, 1, 1.0) == 1
    assert [Cosine(warmup=4).lr(step, 2, 1.0) for step in range(2)] == [0.25, 0.5]
    assert Cosine().lr(0, 1, 1.0) == 1
