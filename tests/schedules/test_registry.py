"""Named schedules against torch's tables, against the numbers of their papers, and whether they
are whole.
"""

import re
from collections import Counter
from time import process_time
from timeit import timeit
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.schedules import torch_orders
from helpers.schedules.clock import held, measured, measured_groups
from scalec.compiler.schedules.actions import Action, Schedule, ScheduleError, Work
from scalec.compiler.schedules.registry import SCHEDULES

RANKS = (2, 3, 4, 8)
# F, I, W; W is not longer than F and I, as the papers' formulas assume
TIMES = ((1, 1, 1), (4, 5, 3), (4, 5, 2))
VARIABLE = [name for name, maker in SCHEDULES.items() if maker.variable]


def asked(
    name: str, ranks: int, microbatches: int, chunks: int | None = None
) -> Schedule | ScheduleError:
    try:
        return SCHEDULES[name](ranks, microbatches, chunks)
    except ScheduleError as impossible:
        return impossible


def text(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.rows]


def test_1f1b_in_full():
    assert text(SCHEDULES["1f1b"](3, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_zero_bubbles_as_drawn():
    """Figure 3 of arXiv 2401.10241, 4 devices and 8 microbatches: its first and its last device."""
    h1, h2 = text(SCHEDULES["zb_h1"](4, 8)), text(SCHEDULES["zb_h2"](4, 8))
    assert h1[0] == (
        "0F0 0F1 0F2 0F3 0I0 0W0 0F4 0I1 0W1 0F5 0I2 0W2 0F6 0I3 0W3 0F7 0I4 0W4 0I5 0W5 0I6"
        " 0W6 0I7 0W7"
    )
    assert h1[3] == (
        "3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1 3F5 3I5 3W2 3F6 3I6 3W3 3F7 3I7 3W4"
        " 3W5 3W6 3W7"
    )
    assert h2[0] == (
        "0F0 0F1 0F2 0F3 0F4 0F5 0F6 0I0 0W0 0F7 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5 0I6"
        " 0W6 0I7 0W7"
    )
    assert h2[3] == (
        "3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3F4 3I4 3F5 3I5 3F6 3I6 3W0 3F7 3I7 3W1 3W2 3W3 3W4"
        " 3W5 3W6 3W7"
    )


@pytest.mark.sample(12)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", [*torch_orders.SINGLE, *torch_orders.SEVERAL])
def test_order_is_torchs(name: str, ranks: int):
    """Also that torch refuses what is impossible here; `test_1f1b_of_few_microbatches` has what
    only torch refuses.
    """
    for chunks in (1, 2, 3, 4) if name in VARIABLE else (SCHEDULES[name].chunks,):
        for microbatches in (*range(ranks if name == "1f1b" else 1, 14), 16, 17, 24, 25):
            ours = asked(name, ranks, microbatches, chunks)
            if isinstance(ours, ScheduleError):
                with pytest.raises(ValueError, match=f"{microbatches}"):
                    torch_orders.schedule(name, ranks, microbatches, chunks)
                continue
            theirs = torch_orders.orders(
                torch_orders.schedule(name, ranks, microbatches, chunks).pipeline_order
            )
            if name == "1f1b":
                theirs[-1] = counted_from_zero(theirs[-1])
            assert text(ours) == [" ".join(row) for row in theirs]


def counted_from_zero(row: list[str]) -> list[str]:
    """Torch 2.13's table of 1F1B, which is not what it runs by, has the forwards 1 to m on its
    last rank.
    """
    forwards = iter(range(len(row)))
    return [re.sub(r"F\d+", lambda _: f"F{next(forwards)}", word) for word in row]


@pytest.mark.parametrize("ranks", RANKS)
def test_1f1b_of_few_microbatches(ranks: int):
    """Torch refuses fewer microbatches than ranks; here these are 1F1B whose warm-up ends where
    microbatches do.
    """
    for microbatches in range(1, ranks):
        schedule = SCHEDULES["1f1b"](ranks, microbatches)
        assert [held(row) for row in schedule.rows] == [
            min(microbatches, ranks - rank) for rank in range(ranks)
        ]
        assert measured(schedule).bubble == 3 * (ranks - 1)


@pytest.mark.parametrize("ranks", RANKS)
def test_zb_h1_is_torchs_with_one_chunk(ranks: int):
    """Torch has no ZB-H1 of its own, but says that its interleaved zero bubble is that with one
    stage for each rank.
    """
    for microbatches in (ranks, 2 * ranks, 3 * ranks):
        theirs = torch_orders.schedule("interleaved_zero_bubble", ranks, microbatches, 1)
        assert text(SCHEDULES["zb_h1"](ranks, microbatches)) == list(
            map(" ".join, torch_orders.orders(theirs.pipeline_order))
        )


@pytest.mark.parametrize(("f", "i", "w"), TIMES)
@pytest.mark.parametrize("ranks", RANKS)
def test_bubbles_of_the_papers(ranks: int, f: int, i: int, w: int):
    for microbatches in (2 * ranks, 3 * ranks, 5 * ranks):
        for name in ("gpipe", "1f1b"):
            assert measured(SCHEDULES[name](ranks, microbatches), f, i, w).bubble == (ranks - 1) * (
                f + i + w
            )
        # in units of a chunk: 1F1B's divided by the chunks
        for name in ("interleaved_1f1b", "breadth_first"):
            for chunks in (2, 3, 4):
                found = measured(SCHEDULES[name](ranks, microbatches, chunks), f, i, w)
                assert found.bubble == (ranks - 1) * (f + i + w)
        for chunks in (2, 3, 4):
            found = measured(
                SCHEDULES["interleaved_zero_bubble"](ranks, microbatches, chunks), f, i, w
            )
            assert found.bubble == (ranks - 1) * (f + i - w)
        assert measured(SCHEDULES["zb_h1"](ranks, microbatches), f, i, w).bubble == (ranks - 1) * (
            f + i - w
        )
        found = measured(SCHEDULES["zb_h2"](ranks, microbatches), f, i, w)
        assert found.bubble_of_span == (ranks - 1) * (f + i - 2 * w)


@pytest.mark.parametrize("ranks", RANKS)
def test_bubbles_of_the_vs(ranks: int):
    """For times that are all 1, which is what both are made for."""
    for microbatches in (2 * ranks, 3 * ranks, 5 * ranks):
        assert measured(SCHEDULES["zbv"](ranks, microbatches)).bubble_of_span == 0
        dualpipe = SCHEDULES["dualpipev"](ranks, microbatches)
        assert measured(dualpipe).bubble == ranks - 1
        pairs = measured_groups(dualpipe, overlapped(ranks, microbatches))
        assert pairs.bubble == (ranks - 1) * (3 + 2 - 3)  # F&B + B - 3W


def overlapped(ranks: int, microbatches: int) -> list[list[list[Action]]]:
    """DualPipeV's rows with a forward and a backward in one where torch overlaps them."""
    table = torch_orders.schedule("dualpipev", ranks, microbatches, 2).pipeline_order
    return [
        [list(map(action_of, cell.sub_actions or [cell])) for cell in table[rank]]
        for rank in range(ranks)
    ]


def action_of(theirs: Any) -> Action:
    return Action(theirs.stage_index, Work(theirs.computation_type.value), theirs.microbatch_index)


@pytest.mark.parametrize("ranks", RANKS)
def test_microbatches_held(ranks: int):
    """The high-water marks of the papers, in activations of a chunk."""
    microbatches = 4 * ranks
    descending = range(ranks - 1, -1, -1)
    expected = {
        ("gpipe", 1): [microbatches] * ranks,
        ("1f1b", 1): [after + 1 for after in descending],
        ("zb_h1", 1): [ranks] * ranks,
        ("zb_h2", 1): [2 * ranks - 1] * ranks,
        ("zbv", 2): [2 * ranks] * ranks,
        ("dualpipev", 2): [2 * ranks + 1] * ranks,
        **{
            ("interleaved_1f1b", v): [(v - 1) * ranks + 2 * after + 1 for after in descending]
            for v in (2, 3, 4)
        },
        **{("breadth_first", v): [v * microbatches] * ranks for v in (2, 3, 4)},
        **{("interleaved_zero_bubble", v): [v * ranks] * ranks for v in (2, 3, 4)},
    }
    for (name, chunks), marks in expected.items():
        assert [held(row) for row in SCHEDULES[name](ranks, microbatches, chunks).rows] == marks, (
            name
        )


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 8), st.integers(1, 24), st.integers(1, 4))
def test_whole_or_impossible(name: str, ranks: int, microbatches: int, chunks: int):
    schedule = asked(name, ranks, microbatches, chunks)
    if isinstance(schedule, ScheduleError):
        assert len(re.findall(r"\d+", schedule.why)) >= 2
        assert schedule.help
        return
    assert (schedule.stage_to_rank, schedule.microbatches) == (
        SCHEDULES[name].stage_to_rank(ranks, chunks),
        microbatches,
    )
    assert all(schedule.stage_to_rank[action.stage] == rank for rank, _, action in schedule.cells())
    done = Counter(action for _, _, action in schedule.cells())
    assert max(done.values()) == 1
    for stage in range(ranks * chunks):
        for microbatch in range(microbatches):
            works = {work for work in Work if Action(stage, work, microbatch) in done}
            assert works in ({Work.FORWARD, Work.BACKWARD}, {Work.FORWARD, Work.INPUT, Work.WEIGHT})
    measured(schedule)


REFUSALS = [
    (
        ("interleaved_1f1b", 4, 9, 2),
        "9 microbatches cannot be divided into 2 rounds of at least 4: 9 / 2 is not whole",
        "take a multiple of the ranks, such as 8 or 12 microbatches",
    ),
    (
        ("dualpipev", 4, 7, 2),
        "7 microbatches are fewer than the 2 × 4 stages",
        "take at least 8 microbatches, or `zbv`",
    ),
    (
        ("gpipe", 4, 8, 2),
        "a rank has 1 of its stages, not 2",
        "leave `chunks` out, or choose among `interleaved_1f1b`, `breadth_first`,"
        " `interleaved_zero_bubble`",
    ),
    (
        ("zbv", 4, 8, 3),
        "a rank has 2 of its stages, not 3",
        "leave `chunks` out, or choose among `interleaved_1f1b`, `breadth_first`,"
        " `interleaved_zero_bubble`",
    ),
]


@pytest.mark.parametrize(("asked", "why", "help"), REFUSALS)
def test_impossible_says_why(asked: tuple[str, int, int, int], why: str, help: str):
    name, *numbers = asked
    with pytest.raises(ScheduleError) as impossible:
        SCHEDULES[name](*numbers)
    assert (impossible.value.why, impossible.value.help) == (why, help)


def test_refuses_nothing_else():
    """Exactly these numbers of microbatches from 1 to 24 have no schedule on 4 ranks."""
    refused = {
        name: [m for m in range(1, 25) if isinstance(asked(name, 4, m), ScheduleError)]
        for name in SCHEDULES
    }
    assert {name: numbers for name, numbers in refused.items() if numbers} == {
        "interleaved_1f1b": [9, 11, 13, 14, 17, 18, 19, 21, 22, 23],
        "interleaved_zero_bubble": [9, 11, 13, 14, 17, 18, 19, 21, 22, 23],
        "dualpipev": [1, 2, 3, 4, 5, 6, 7],
    }


def test_homes():
    assert SCHEDULES["interleaved_1f1b"].stage_to_rank(3, 3) == (0, 1, 2, 0, 1, 2, 0, 1, 2)
    assert SCHEDULES["breadth_first"].stage_to_rank(2) == (0, 1, 0, 1)
    assert (
        SCHEDULES["zbv"].stage_to_rank(3)
        == SCHEDULES["dualpipev"].stage_to_rank(3, 2)
        == (0, 1, 2, 2, 1, 0)
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_is_fast(name: str):
    """16 ranks, 4 chunks where a schedule has so many, 512 microbatches: a third of a second on
    an idle core.
    """
    chunks = 4 if name in VARIABLE else None
    assert timeit(lambda: SCHEDULES[name](16, 512, chunks), timer=process_time, number=1) < 3
