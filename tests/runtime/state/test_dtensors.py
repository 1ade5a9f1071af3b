"""Values that a state is to take: its own views, or others of the same form; else one line, and
nothing has changed.
"""

import pytest
import torch

from helpers.small_state import made, update
from scalec.runtime import RunError


def test_what_does_not_fit_is_one_line_and_changes_nothing() -> None:
    state, other = made({"dp": 1}, 0), made({"dp": 1}, 1)
    update(other, 0)
    before = {key: value.clone() for key, value in state.state_dict().items()}
    values = other.state_dict()
    for wrong, line in (
        ({"up": None}, "the state to load lacks `up`: it is another plan's, or a part of one"),
        (
            {"up": torch.zeros(2, 2)},
            "the state to load has `up` as float32 [2, 2] on this rank, but the plan's is"
            " float32 [12, 8]",
        ),
        (
            {"up": values["up"].double()},
            "the state to load has `up` as float64 [12, 8] on this rank, but",
        ),
    ):
        given = {key: value for key, value in {**values, **wrong}.items() if value is not None}
        with pytest.raises(RunError) as caught:
            state.load_state_dict(given)
        assert str(caught.value).startswith(line)
        assert all(torch.equal(value, before[key]) for key, value in state.state_dict().items())
    state.load_state_dict(values)
    assert all(torch.equal(value, values[key]) for key, value in state.state_dict().items())
