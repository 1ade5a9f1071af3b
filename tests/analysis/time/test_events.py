"""Events of a predicted step: they are what its account sums up, and no stream does two things
at once.
"""

from collections import defaultdict
from itertools import pairwise
from math import inf

import pytest

from helpers.timed_plans import HARDWARE, PROGRAMS, several
from scalec.compiler.analysis.time.clocks import GPU
from scalec.compiler.analysis.time.events import ACTIONS, ITERATIONS, events_of
from scalec.compiler.analysis.time.step import step_time
from scalec.compiler.ir import Program


def rank_of(program: Program) -> int:
    return step_time(program, HARDWARE).rank or 0


@several
def test_events_add_up_to_the_account(name: str) -> None:
    found, spent, sent = step_time(PROGRAMS[name], HARDWARE), defaultdict[str, float](float), 0.0
    for event in events_of(PROGRAMS[name], HARDWARE, most=inf)[found.rank or 0]:
        if event.stream == GPU:
            spent[event.kind] += event.end - event.begin
        sent += (event.end - event.begin) * isinstance(event.stream, tuple)
    kinds = {kind: seconds for kind, seconds in spent.items() if seconds > 1e-12}
    assert kinds == pytest.approx(
        {kind: s for kind, s in found.kinds.items() if s > 1e-12}, rel=1e-6
    )
    assert sent == pytest.approx(sum(found.sent.values()), rel=1e-6)


@several
def test_each_stream_does_one_thing_at_a_time_and_the_gpu_something_all_the_time(name: str) -> None:
    for events in events_of(PROGRAMS[name], HARDWARE, most=inf):
        streams = defaultdict[object, list[tuple[float, float]]](list)
        for event in events:
            assert event.end >= event.begin
            streams[event.stream].append((event.begin, event.end))
        ends = [end for _, end in streams[GPU]]
        assert max(ends) == pytest.approx(step_time(PROGRAMS[name], HARDWARE).seconds)
        assert [begin for begin, _ in streams[GPU]] == pytest.approx([0.0, *ends[:-1]])
        for stream, spans in streams.items() if not PROGRAMS[name].pipeline else ():
            assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(spans)), stream


@pytest.mark.parametrize("name", ["one rank", "zero 3, far ahead", "ring", "pipeline"])
def test_where_there_are_too_many_iterations_are_one_event(name: str) -> None:
    few, all = (
        events_of(PROGRAMS[name], HARDWARE, most=most)[rank_of(PROGRAMS[name])] for most in (0, inf)
    )
    few_gpu, all_gpu = ([it for it in of if it.stream == GPU] for of in (few, all))
    assert len(few) < len(all)
    assert sum(it.end - it.begin for it in few_gpu) == pytest.approx(
        sum(it.end - it.begin for it in all_gpu)
    )
    assert any(it.kind.endswith(ITERATIONS) for it in few) or any(
        it.stream == ACTIONS for it in few
    )
