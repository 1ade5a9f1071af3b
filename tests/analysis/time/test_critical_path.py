"""The critical path: as long as the step, and an op's slack is what it may take longer."""

from unittest.mock import patch

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.timed_plans import HARDWARE, PROGRAMS, several
from scalec.compiler.analysis.time import critical_path as module
from scalec.compiler.analysis.time.clocks import GPU, HOST, Event
from scalec.compiler.analysis.time.critical_path import Streams, critical_path
from scalec.compiler.analysis.time.prices import EXPOSED
from scalec.compiler.analysis.time.step import step_time


@settings(max_examples=25)
@given(
    st.sampled_from(sorted(PROGRAMS)),
    st.floats(6.0, 13.0),
    st.floats(6.0, 13.0),
    st.floats(-8.0, -3.0),
)
def test_the_path_is_as_long_as_the_step(name: str, link: float, network: float, op: float) -> None:
    """On links and hosts of any speed."""
    on = evolve(HARDWARE, link=10**link, network=10**network, op=10**op)
    found, step = critical_path(PROGRAMS[name], on), step_time(PROGRAMS[name], on)
    assert found.seconds == pytest.approx(step.seconds, rel=1e-6, abs=1e-8)
    assert all(found.slack[line] <= 1e-8 for line, seconds in found.on_path.items() if seconds)


def test_slack_is_by_how_much_a_collective_may_be_slower() -> None:
    """It begins after the first product, and is waited for after the second."""
    axes, streams = ("dp",), Streams()
    streams.add(
        [
            Event(HOST, HOST, "a", 0.0, 1.0, 0.0),
            Event(GPU, "products", "a", 0.0, 2.0, 2.0),
            Event(axes, "gather", "g", 2.0, 3.0, 2.0),
            Event(GPU, "products", "b", 2.0, 6.0, 6.0),
            Event(GPU, f"{EXPOSED}dp", "g", 6.0, 6.0, 3.0),
            Event(GPU, "products", "c", 6.0, 7.0, 7.0),
        ]
    )
    found = streams.graph.path(7.0)
    assert found.seconds == 7.0
    assert found.on_path == {("products", "a"): 2.0, ("products", "b"): 4.0, ("products", "c"): 1.0}
    assert found.slack["gather: dp", "g"] == 3.0
    assert found.slack["host", "a"] == 4.0  # the gather may begin at 5
    assert all(found.slack["products", line] == 0.0 for line in "abc")


@several
def test_iterations_as_one_change_little(name: str) -> None:
    each = critical_path(PROGRAMS[name], HARDWARE)
    with patch.object(module, "MOST", 0):
        few = critical_path(PROGRAMS[name], HARDWARE)
    assert few.seconds == pytest.approx(each.seconds, rel=1e-6)
    assert set(few.slack) >= set(each.slack)
