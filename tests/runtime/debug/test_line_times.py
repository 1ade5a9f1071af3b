"""The sums of a trace by plan line: of a GPU by its kernels, of a CPU by ops and threads of
collectives.
"""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalec.runtime.debug.line_times import COMPUTE, EXPOSED, IDLE, line_times, longest

RECORDED = Path(__file__).with_name("recorded_trace.json")
"""The first half of a step of `helpers/bigram.py` on one of two ranks, as torch's profiler and
`add_lines` left it.
"""

MAIN, GLOO, STREAM, NCCL = 1, 2, 7, 20


def _event(
    name: str, start: float, end: float, thread: int = MAIN, cat: str = "cpu_op", line: str = ""
) -> dict[str, Any]:
    args = {"line": line} if line else {}
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 1,
        "tid": thread,
        "ts": start,
        "dur": end - start,
        "args": args,
    }


def _step(number: int, start: float, end: float) -> dict[str, Any]:
    return _event(f"step {number}", start, end, cat="user_annotation")


def _seconds(trace: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    lines = line_times({"traceEvents": trace})["lines"]
    return {
        (line, kind): time * 1e6
        for line, kinds in lines.items()
        for kind, time in kinds.items()
        if time
    }


def test_of_a_gpu_communication_is_exposed_where_no_other_kernel_runs() -> None:
    """A gap counts to the kernel that ends it; of two streams that compute, the later kernel
    counts.
    """
    events = [
        _step(4, 0, 5),
        _event("gemm", 100, 120, STREAM, "kernel", "m.scale:1"),
        _event("ncclDevKernel_AllGather_RING_LL", 110, 150, NCCL, "kernel", "m.scale:2"),
        _event("gemm", 160, 170, STREAM, "kernel", "m.scale:3"),
        _event("Memset", 165, 175, STREAM + 1, "gpu_memset", "m.scale:4"),
        _event("elementwise", 180, 190, STREAM, "kernel"),
        _event("aten::mm", 0, 4, line="m.scale:1"),
    ]
    assert _seconds(events) == pytest.approx({
        ("m.scale:1", COMPUTE): 20, ("m.scale:2", EXPOSED): 30, ("m.scale:3", IDLE): 10, ("m.scale:3", COMPUTE): 5,
        ("m.scale:4", COMPUTE): 10, ("", IDLE): 5, ("", COMPUTE): 10,
    })  # fmt: skip
    assert line_times({"traceEvents": events})["device"] == "cuda"


def test_of_two_that_start_together_the_shorter_counts_and_of_equal_ones_the_last() -> None:
    kernels = [_event("gemm", 0, end, STREAM, "kernel", f"m.scale:{end}") for end in (10, 20)]
    kernels.append(_event("gemm", 0, 10, STREAM, "kernel", "m.scale:3"))
    assert _seconds([_step(4, 0, 5), *kernels]) == pytest.approx(
        {("m.scale:3", COMPUTE): 10, ("m.scale:20", COMPUTE): 10}
    )


def test_of_a_cpu_communication_is_exposed_where_its_thread_hands_it_over_or_waits() -> None:
    """What another thread does is hidden; time outside of steps is left out; two steps are
    averaged.
    """
    step = [
        _step(4, 0, 100),
        _event("m.scale:1  y = x @ w", 10, 40, cat="user_annotation"),
        _event("aten::mm", 12, 32, line="m.scale:1"),
        _event("m.scale:2  z = all_reduce(y)", 40, 90, cat="user_annotation"),
        _event("c10d::allreduce_", 42, 45, line="m.scale:2"),
        _event("aten::empty", 43, 44, line="m.scale:2"),
        _event("gloo:all_reduce", 30, 80, GLOO, "user_annotation"),
        _event("Wrapper", 58, 84, line="m.scale:2"),
        _event("aten::add", 60, 70, line="m.scale:2"),
        _event("wait", 71, 81, cat="user_annotation"),
        _event("aten::copy_", 60, 99, GLOO),
    ]
    after = [_event("aten::item", 110, 190), _event("wait", 110, 190, cat="user_annotation")]
    once = {
        ("m.scale:1", IDLE): 10, ("m.scale:1", COMPUTE): 20, ("", IDLE): 20,
        ("m.scale:2", EXPOSED): 13, ("m.scale:2", COMPUTE): 16, ("m.scale:2", IDLE): 21,
    }  # fmt: skip
    assert _seconds([*step, *after]) == pytest.approx(once)
    assert _seconds(
        [*step, *after, *({**event, "ts": event["ts"] + 1000} for event in step)]
    ) == pytest.approx(once)


def _one_by_one(events: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    """Each stretch in which nothing begins or ends, by all events: an independent way to the
    same sums.
    """
    found = Counter[tuple[str, str]]()
    times = sorted({time for event in events for time in (event["ts"], event["ts"] + event["dur"])})
    for start, end in pairwise(times):
        now = [
            event for event in events if event["ts"] <= start and end <= event["ts"] + event["dur"]
        ]
        if not any(event["name"].startswith("step ") for event in now):
            continue
        own = [event for event in now if event["tid"] == MAIN]
        ops = [event["name"] for event in own if event["cat"] == "cpu_op"]
        places = [
            event for event in own if event["cat"] == "user_annotation" and "  " in event["name"]
        ]
        line = (
            max(places, key=lambda event: event["ts"])["name"].partition("  ")[0] if places else ""
        )
        sends = any(event["name"].startswith("c10d::") or event["name"] == "wait" for event in own)
        kind = EXPOSED if sends else COMPUTE if ops else IDLE
        found[line.removeprefix("backward of "), kind] += end - start
    return found


def test_a_recorded_trace() -> None:
    events = json.loads(RECORDED.read_text())
    found = _seconds(events)
    assert found == pytest.approx(dict(_one_by_one(events)))
    assert sum(found.values()) == pytest.approx(events[0]["dur"])
    assert found["bigram.py:69", EXPOSED] > 0.8 * events[0]["dur"]  # an all-reduce of a few labels
    assert {line for line, kind in found if kind == COMPUTE} == {
        f"bigram.py:{at}" for at in (57, 69, 70, 71, 73, 74)
    }


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                [
                    "aten::mm",
                    "c10d::allreduce_",
                    "wait",
                    "gloo:send",
                    "m.scale:1  a",
                    "m.scale:2  b",
                ]
            ),
            st.integers(0, 40),
            st.integers(1, 30),
        ),
        max_size=8,
        unique_by=lambda it: it[1],
    )
)
def test_sums_are_those_of_each_moment(drawn: list[tuple[str, int, int]]) -> None:
    events = [_step(1, 5, 60)]
    for name, start, length in drawn:
        gloo, cat = name.startswith("gloo:"), "cpu_op" if "::" in name else "user_annotation"
        events.append(_event(name, start, start + length, GLOO if gloo else MAIN, cat))
    assert _seconds(events) == pytest.approx(dict(_one_by_one(events)))


def test_the_lines_that_exceed_the_prediction_most(tmp_path: Path) -> None:
    """All that no line of the model asked for is one of them."""
    inside = {"m.scale:1": {COMPUTE: 0.1}, "m.scale:2": {EXPOSED: 0.09, IDLE: 0.01}}
    measured = {"lines": inside | {"": {IDLE: 0.01}, "train.py:9": {EXPOSED: 0.05}}}
    lines = [{"kind": "products", "line": "m.scale:1", "seconds": 0.08}]
    lines += [{"kind": "exposed: dp", "line": "m.scale:7", "seconds": 0.02}]
    path = tmp_path / "plan.json"
    assert not longest(measured, path)
    path.write_text(json.dumps({"name": "m"}))
    assert not longest(measured, path)
    path.write_text(json.dumps({"time": {"lines": lines}}))
    first = "m.scale:2 100.0 ms in place of 0.0, elsewhere 60.0 ms in place of 20.0"
    assert longest(measured, path) == f"{first}, m.scale:1 100.0 ms in place of 80.0"
