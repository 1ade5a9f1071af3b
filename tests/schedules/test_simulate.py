"""When actions happen, and what ranks hold meanwhile.

Non-goals: how large schedules may be (`test_check`).
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.schedules.samples import durations, gpipe, one_f_one_b, orders, parsed
from scalec.compiler.schedules.actions import Schedule
from scalec.compiler.schedules.activation_memory import Keeps, high_water
from scalec.compiler.schedules.dependencies import Stuck, get_inputs, get_result
from scalec.compiler.schedules.timeline import Times, simulate


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@given(
    ranks=st.integers(1, 6),
    more=st.integers(0, 9),
    f=st.integers(1, 4),
    b=st.integers(1, 4),
    w=st.integers(0, 4),
)
def test_bubbles_equal_the_formula(make, ranks: int, more: int, f: int, b: int, w: int) -> None:
    microbatches = ranks + more
    timeline = simulate(make(ranks, microbatches), Times.uniform(ranks, f, b, w))
    assert timeline.total == (microbatches + ranks - 1) * (f + b + w)
    assert timeline.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@given(ranks=st.integers(2, 4), chunks=st.integers(2, 4), layers=st.integers(1, 3))
def test_chunks_divide_the_bubble(ranks: int, chunks: int, layers: int) -> None:
    microbatches = layers * ranks
    timeline = simulate(one_f_one_b(ranks, microbatches, chunks), Times.uniform(ranks * chunks))
    assert timeline.bubble == pytest.approx((ranks - 1) / (chunks * microbatches + ranks - 1))


def test_a_small_case_by_hand() -> None:
    """Two stages with times of their own: rank 1 waits for messages and rank 0 for the
    gradient, W fills the wait.
    """
    schedule = parsed((0, 1), 2, "0F0 0F1 0I0 0W0 0B1", "1F0 1B0 1F1 1I1 1W1")
    times = Times(forward=(2, 3), input=(1, 2), weight=(3, 1), send=0.5)
    starts = [
        [(str(slot.action), slot.start, slot.end) for slot in row]
        for row in simulate(schedule, times).slots
    ]
    assert starts[0] == [
        ("0F0", 0, 2),
        ("0F1", 2, 4),
        ("0I0", 9, 10),
        ("0W0", 10, 13),
        ("0B1", 14, 18),
    ]
    assert starts[1] == [
        ("1F0", 2.5, 5.5),
        ("1B0", 5.5, 8.5),
        ("1F1", 8.5, 11.5),
        ("1I1", 11.5, 13.5),
        ("1W1", 13.5, 14.5),
    ]


@given(schedule=orders(), data=st.data())
def test_each_action_begins_as_soon_as_it_can(schedule: Schedule, data: st.DataObject) -> None:
    times = data.draw(durations(schedule.stages))
    rows = simulate(schedule, times).slots
    done = {get_result(slot.action): slot.end for row in rows for slot in row}
    for rank, row in enumerate(rows):
        assert tuple(slot.action for slot in row) == schedule.rows[rank]
        free = 0.0
        for slot in row:
            late = {
                value: times.send * (schedule.stage_to_rank[value.stage] != rank)
                for value in get_inputs(slot.action, schedule.stages)
            }
            assert slot.start == max(free, *(done[value] + late[value] for value in late), 0.0)
            assert slot.end == slot.start + times.get_time(slot.action)
            free = slot.end


def test_messages_on_one_rank_take_no_time() -> None:
    assert simulate(parsed((0, 0), 1, "0F0 1F0 1B0 0B0"), Times.uniform(2, comm=100)).total == 6


def test_rows_that_wait_for_each_other_are_stuck() -> None:
    with pytest.raises(Stuck, match="rank 0 waits in cell 1"):
        simulate(parsed((0, 1), 2, "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), Times.uniform(2))


@given(ranks=st.integers(1, 6), microbatches=st.integers(1, 12))
def test_high_water_marks_of_the_classical_schedules(ranks: int, microbatches: int) -> None:
    assert high_water(gpipe(ranks, microbatches)) == (microbatches,) * ranks
    assert high_water(one_f_one_b(ranks, microbatches)) == tuple(
        min(ranks - r, microbatches) for r in range(ranks)
    )


def test_what_is_kept_goes_in_two_parts() -> None:
    schedule = parsed((0, 0), 2, "0F0 1F0 1I0 0I0 0F1 1F1 1I1 1W1 0I1 0W1 1W0 0W0")
    assert high_water(schedule) == (4,)
    assert high_water(schedule, Keeps(input=(10, 100), weight=(1, 7))) == (118,)
    assert high_water(schedule, Keeps(input=(10, 100), weight=(0, 0))) == (110,)
    assert high_water(schedule, Keeps(input=(1, 1), weight=(10, 10))) == (31,)


def test_backward_in_one_frees_all() -> None:
    assert high_water(parsed((0,), 2, "0F0 0B0 0F1 0B1"), Keeps((5,), (3,))) == (5,)
