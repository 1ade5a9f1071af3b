"""Laws of a step's time that no program breaks: what is faster never makes it longer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from analysis.time.test_step_time import RATES
from helpers.timed_plans import HARDWARE, PROGRAMS, compiled
from scalec.compiler.analysis.hardware import hardware
from scalec.compiler.analysis.time.clocks import Clocks
from scalec.compiler.analysis.time.events import events_of
from scalec.compiler.analysis.time.prices import Price, prices
from scalec.compiler.analysis.time.step import step_time
from scalec.compiler.analysis.time.timeline import Walk
from scalec.compiler.ir import Op, Program
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

PLANS = Path(__file__).parents[3] / "plans"

ALL = PROGRAMS | {
    "zero 2": compiled("dp = 4", "batch over dp", "state { zero 2 over dp }"),
    "pipeline, zero 3": compiled(
        "pp = 2  dp = 2",
        "batch over dp\nlayers over pp",
        "state { zero 3 over dp }\npipeline { schedule = interleaved_1f1b(chunks=2) }",
    ),
    "ring, zero 3": compiled(
        "dp = 2  cp = 2", "batch over dp\nseq over cp via ring", "state { zero 3 over dp }"
    ),
}

names = st.sampled_from(sorted(ALL))
speeds = st.floats(6.0, 13.0)


def scaled(rate: Any, times: float) -> Any:
    return (
        {dtype: part * times for dtype, part in rate.items()}
        if isinstance(rate, dict)
        else rate * times
    )


def test_a_sum_over_other_ranks_begins_once_the_sum_before_it_is_there() -> None:
    """Gradients are scattered over dp, then summed over cp: the last sum ends after both,
    whatever else is free.
    """
    on = evolve(HARDWARE, link=1e4, link_latency=0.0, op=0.0, collective=0.0)
    rank = events_of(ALL["ring, zero 3"], on)[0]
    scattered, summed = (
        [it for it in rank if it.stream == (axis,) and it.kind == "reduction"]
        for axis in ("dp", "cp")
    )
    ends = {round(it.end, 6) for it in scattered}
    after = [it for it in summed if round(it.due, 6) in ends]
    assert len(after) >= 16  # layers and microbatches
    assert all(it.begin >= it.due - 1e-9 for it in after)


@given(names, st.sampled_from(RATES), st.floats(1.0, 100.0), speeds, speeds, st.floats(0.0, 0.9))
def test_nothing_gets_slower_by_a_higher_rate(
    name: str, rate: str, times: float, link: float, network: float, contention: float
) -> None:
    """On links of any speed, beside which the GPU computes at any part of its rate."""
    on = evolve(HARDWARE, link=10**link, network=10**network, contention=contention)
    faster = evolve(on, **{rate: scaled(getattr(on, rate), times)})
    assert step_time(ALL[name], faster).seconds <= step_time(ALL[name], on).seconds * (1 + 1e-9)


WALKED = {name: program for name, program in ALL.items() if not program.pipeline}


def walked(program: Program, of: Callable[[Op], Price]) -> float:
    it = Walk(program, evolve(HARDWARE, link=1e8, contention=0.3), of)
    it.step()
    return it.clocks.gpu


@given(st.sampled_from(sorted(WALKED)), st.integers(0, 7), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_nothing_gets_slower_by_ops_with_fewer_bytes_or_operations(
    name: str, chosen: int, sent: float, computed: float
) -> None:
    """Of one line in eight."""
    whole = prices(WALKED[name], evolve(HARDWARE, link=1e8))

    def less(op: Op) -> Price:
        it = whole(op)
        if int(it.line.rsplit(":")[-1]) % 8 != chosen:
            return it
        sends = tuple((axes, seconds * sent) for axes, seconds in it.sends)
        return evolve(
            it,
            sends=sends,
            computes=tuple((kind, seconds * computed) for kind, seconds in it.computes),
        )

    assert walked(WALKED[name], less) <= walked(WALKED[name], whole) * (1 + 1e-9)


@given(names, speeds, speeds, st.floats(-8.0, -3.0), st.just(0.0) | st.floats(0.0, 0.9))
def test_iterations_that_are_alike_may_be_counted(
    name: str, link: float, network: float, op: float, contention: float
) -> None:
    """On links and hosts of any speed: whatever of them is ahead, catches up or falls back."""
    on = evolve(HARDWARE, link=10**link, network=10**network, op=10**op, contention=contention)
    counted = step_time(ALL[name], on)
    with patch.object(Clocks, "is_steady", lambda *_: False):
        each = step_time(ALL[name], on)
    assert counted.seconds == pytest.approx(each.seconds, rel=1e-9)
    assert counted.kinds == pytest.approx(each.kinds, rel=1e-6, abs=1e-12)


def test_a_rank_alone_reduces_nothing() -> None:
    found = step_time(compiled("dp = 1", "batch over dp", "state { zero 2 over dp }"), HARDWARE)
    assert not any(found.sent.values())


# ---- speed


@pytest.mark.parametrize(("plan", "most"), [("llama3_405b", 2_000), ("deepseek_v3", 20_000)])
def test_iterations_that_are_alike_are_not_walked(plan: str, most: int) -> None:
    """Of 126 layers and 2,048 ranks so few are that a step is priced in a hundredth of a second."""
    path, times = PLANS / f"{plan}.scale", 0
    program = compile_plan(Source(str(path), path.read_text(encoding="utf-8")))
    on, until = hardware(program), Clocks.until
    assert on

    def counted(self: Clocks, time: float, kind: str, line: str) -> None:
        nonlocal times
        times += 1
        until(self, time, kind, line)

    with patch.object(Clocks, "until", counted):
        step_time(program, on)
    assert 100 < times < most
