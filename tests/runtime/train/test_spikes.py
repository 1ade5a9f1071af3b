"""Losses that are told as spikes."""

from hypothesis import given
from hypothesis import strategies as st

from scalec.runtime.train.spikes import LEAST, Spikes

CALM = st.lists(st.floats(1.0, 2.0), min_size=LEAST, max_size=100)


@given(CALM)
def test_losses_that_stay_near_their_median_are_none(losses: list[float]) -> None:
    spikes = Spikes(1e6)
    assert not any(spikes.after(step, loss) for step, loss in enumerate(losses))


@given(CALM)
def test_a_loss_far_above_is_told_each_time(losses: list[float]) -> None:
    """A spike does not enter the window: it cannot hide the next."""
    spikes = Spikes(10.0)
    for loss in losses:
        spikes.after(1, loss)
    for step in range(200):
        assert spikes.after(step, 100.0).startswith(f"step {step}: loss 100.0000 is a spike: ")
    assert not spikes.after(1, min(losses))
