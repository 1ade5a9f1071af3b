"""The time of a pipeline: rows, messages between stages, gathers and reductions of chunks
beside the rows.
"""

from collections.abc import Iterator

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from helpers.timed_plans import HARDWARE, LAYERS, compiled
from scalec.compiler.analysis.time.clocks import BUBBLE
from scalec.compiler.analysis.time.pipeline import Rows
from scalec.compiler.analysis.time.prices import EXPOSED
from scalec.compiler.analysis.time.step import step_time
from scalec.compiler.ir import Program
from scalec.compiler.schedules.actions import Schedule
from scalec.compiler.schedules.dependencies import get_inputs, get_result
from scalec.compiler.schedules.registry import SCHEDULES
from scalec.compiler.schedules.timeline import Times, simulate

FREE = evolve(HARDWARE, op=0.0, collective=0.0, link_latency=0.0, network_latency=0.0)


def pipeline(
    mesh: str, state: str = "", schedule: str = "interleaved_1f1b(chunks=2)", layers: int = LAYERS
) -> Program:
    batch = "batch over dp\n" if "dp" in mesh else ""
    rest = f"{f'state {{ {state} }}' if state else ''}\npipeline {{ schedule = {schedule} }}"
    return compiled(mesh, f"{batch}layers over pp", rest, layers=layers)


def longest_paths(schedule: Schedule, times: Times) -> dict[str, float]:
    """When each action ends: what it waits for is done, relaxed until nothing changes."""
    rows = [[it for it in row if not it.work.is_message] for row in schedule.rows]
    makers = {get_result(it): it for row in rows for it in row if get_result(it)}
    ends = {str(it): 0.0 for row in rows for it in row}

    def waits(rank: int, at: int) -> Iterator[float]:
        action = rows[rank][at]
        yield times.ready[action.stage]
        if at:
            yield ends[str(rows[rank][at - 1])]
        for value in get_inputs(action, schedule.stages):
            cut = min(value.stage, action.stage)
            far = schedule.stage_to_rank[value.stage] != rank
            yield ends[str(makers[value])] + (times.cuts[cut] if far else 0.0)

    before: dict[str, float] = {}
    while before != ends:
        before = dict(ends)
        for rank, row in enumerate(rows):
            for at, action in enumerate(row):
                ends[str(action)] = max(waits(rank, at)) + times.get_time(action)
    return ends


seconds = st.floats(0.0, 5.0)


@given(
    st.sampled_from(
        [("1f1b", None), ("interleaved_1f1b", 2), ("zb_h1", None), ("dualpipev", None)]
    ),
    st.integers(2, 3),
    st.data(),
)
def test_rows_take_the_longest_path_through_what_they_wait_for(
    kind: tuple[str, int | None], ranks: int, data: st.DataObject
) -> None:
    schedule = SCHEDULES[kind[0]](ranks, 2 * ranks, kind[1])
    of = [tuple(data.draw(st.tuples(*[seconds] * schedule.stages))) for _ in range(5)]
    times = Times(of[0], of[1], of[2], cuts=of[3][1:], ready=of[4])
    slots = {str(slot.action): slot.end for row in simulate(schedule, times).slots for slot in row}
    assert slots == pytest.approx(longest_paths(schedule, times))


def test_messages_take_the_link_between_the_ranks_of_two_stages() -> None:
    """Of four ranks on two nodes the second and the third are on two; a rank sends itself
    nothing.
    """
    on = evolve(FREE, link=1e9, network=1e9, ranks_per_node=2)
    program = pipeline("pp = 4", schedule="interleaved_1f1b(chunks=2)", layers=8)
    assert program.pipeline
    cuts = Rows(program, program.pipeline, on).times.cuts
    near, far = cuts[:2]
    assert far == pytest.approx(2 * near)
    assert cuts == pytest.approx((near, far, near, far, near, far, near))


def exposed(program: Program, link: float) -> tuple[float, float]:
    """The time in which the rank waits for dp, and in which dp's links are busy."""
    found = step_time(program, evolve(FREE, link=link, network=link))
    waited = sum(
        seconds
        for kind, seconds in found.kinds.items()
        if kind.startswith(EXPOSED) and "dp" in kind
    )
    return waited, sum(seconds for axes, seconds in found.sent.items() if "dp" in axes)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_chunks_are_gathered_and_reduced_beside_the_rows(zero: int) -> None:
    """Of two chunks one is gathered and one reduced while the rank computes with the other."""
    one, two = (
        pipeline("pp = 2  dp = 2", f"zero {zero} over dp", "1f1b"),
        pipeline("pp = 2  dp = 2", f"zero {zero} over dp"),
    )
    (alone, whole), (beside, halves) = (exposed(program, 2e8) for program in (one, two))
    assert halves == pytest.approx(whole, rel=0.35)
    assert 0 < beside < 0.7 * halves
    assert beside < alone <= whole * (1 + 1e-9)


def test_a_row_waits_for_weights_and_for_nothing_once_they_are_there() -> None:
    program = pipeline("pp = 2  dp = 2", "zero 1 over dp")
    slow, fast = (step_time(program, evolve(FREE, link=link)).seconds for link in (1e6, 1e15))
    assert slow > 5 * fast


def test_a_pipeline_of_one_rank_has_no_bubble() -> None:
    found = step_time(pipeline("pp = 1", schedule="1f1b"), HARDWARE)
    assert found.kinds.get(BUBBLE, 0.0) == pytest.approx(0.0, abs=1e-12)


def test_data_parallel_ranks_of_one_reduce_nothing() -> None:
    assert not any("dp" in axes for axes in step_time(pipeline("pp = 2  dp = 1"), HARDWARE).sent)


@pytest.mark.parametrize("state", ["zero 1 over dp", "zero 3 over dp"])
def test_actions_beside_what_their_rank_sends_are_slower(state: str) -> None:
    """By the part of its rate that the GPU loses meanwhile, and by none where links take no
    time.
    """
    program = pipeline("pp = 2  dp = 2", state)
    assert program.pipeline
    slow = evolve(FREE, link=1e8, network=1e8)
    alone = Rows(program, program.pipeline, slow)
    beside = Rows(program, program.pipeline, evolve(slow, contention=0.2))
    pairs = [*zip(beside.times.forward, alone.times.forward, strict=True)]
    assert all(longer >= shorter for longer, shorter in pairs)
    assert any(longer > shorter * 1.01 for longer, shorter in pairs)
    assert all(longer <= shorter / (1 - 0.2) * (1 + 1e-9) for longer, shorter in pairs)
    instant = evolve(FREE, link=1e30, network=1e30)
    same = Rows(program, program.pipeline, evolve(instant, contention=0.2))
    assert same.times.forward == pytest.approx(
        Rows(program, program.pipeline, instant).times.forward
    )


def test_the_account_of_a_slowed_rank_adds_up_to_the_step() -> None:
    program = pipeline("pp = 2  dp = 2", "zero 3 over dp")
    assert program.pipeline
    rows = Rows(program, program.pipeline, evolve(FREE, link=1e8, network=1e8, contention=0.2))
    for rank in range(2):
        account = rows.account(rank)
        assert sum(account.spent.values()) == pytest.approx(rows.seconds)
        assert (
            account.spent[BUBBLE, rows.line]
            <= rows.timeline.idle(rank) + rows.seconds - rows.timeline.total + 1e-12
        )
