"""The place of a rank in the plan, by counts of its groups and torch's record of calls, and in
its program.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from helpers.forked_ranks import plain_groups, run_ranks
from scalec.compiler.emit import emit
from scalec.compiler.syntax.limits import load
from scalec.compiler.tuning.lowering import compile_plan
from scalec.runtime import Mesh
from scalec.runtime.comm.collectives import all_reduce_
from scalec.runtime.comm.store import job_store
from scalec.runtime.train.watchdog import position
from scalec.runtime.train.watchdog.call_order import Call, get_planned_calls

_calls, _pending = position._find_calls, position._find_pending_calls  # pyright: ignore[reportPrivateUsage]


def _call(group: str, number: int) -> Call:
    return Call(group, "all_reduce", f"v{number}", "step", "a.scale:1", 1, "", None)


ORDER = [_call(group, number) for number, group in enumerate("aabacbbac")]


@given(st.integers(0, len(ORDER)))
def test_counts_of_a_beginning_of_the_order_are_a_place_in_it(made: int) -> None:
    counts = {group: sum(each.group == group for each in ORDER[:made]) for group in "abc"}
    calls, astray = _calls(iter(ORDER), counts, {})
    assert not astray
    assert [*calls.values()][-1:] == ORDER[:made][-1:]


@given(st.fixed_dictionaries({group: st.integers(0, 4) for group in "abc"}))
def test_all_other_counts_have_left_the_order(counts: dict[str, int]) -> None:
    beginnings = [
        {group: sum(each.group == group for each in ORDER[:made]) for group in "abc"}
        for made in range(len(ORDER) + 1)
    ]
    _, astray = _calls(iter(ORDER), counts, {})
    assert bool(astray) == (counts not in beginnings)


def test_how_it_has_left_the_order() -> None:
    _, astray = _calls(iter(ORDER), {"a": 2, "b": 0, "c": 1}, {})
    told = (
        "it has made 1 call over c where the plan has 0 before all_reduce of `v2` over b, a.scale:1"
    )
    assert astray == told


def test_an_evaluation_goes_over_the_order_more_than_once() -> None:
    counts = {"a": 4 + 1, "b": 3, "c": 2}
    calls, astray = _calls(chain.from_iterable(repeat(ORDER)), counts, {})
    assert not astray
    assert [*calls.values()][-1] == ORDER[0]


def test_the_first_call_that_is_not_done_is_the_one_that_is_waited_for() -> None:
    """As the host runs ahead of a GPU: 4 calls over a have begun, of which 2 are done, and all
    over b and c.
    """
    calls, astray = _calls(iter(ORDER), {"a": 4, "b": 3, "c": 1}, {"a": 3})
    assert not astray
    assert [*calls.values()] == [ORDER[3]]


def test_without_a_plan_nobody_leaves_its_order() -> None:
    assert _calls(iter(()), {"a": 3}, {}) == ({}, "")


def _two_calls_ahead() -> tuple[dict[str, int], dict[str, int]]:
    mesh = Mesh({"dp": 2})
    dp, x = mesh.axis("dp"), torch.ones(4)
    for _ in range(3):
        dp.group.allreduce([x]).wait()
    _settled(mesh)
    if dist.get_rank() == 1:
        job_store().wait(["looked"])
    works = [dp.group.allreduce([torch.ones(4)]) for _ in range(2)]
    found = _pending(mesh.groups())
    job_store().set("looked", "")
    for work in works:
        work.wait()
    _settled(mesh)
    return found, {}


def _settled(mesh: Mesh) -> None:
    """Torch records a little after a call is done that it is."""
    while _pending(mesh.groups()):
        time.sleep(0.01)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks whose Flight Recorder keeps calls, as it does for NCCL."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    with plain_groups():
        yield


@pytest.mark.usefixtures("recorded")
def test_torch_knows_the_first_call_that_is_not_done() -> None:
    (ahead, done), _ = run_ranks(2, _two_calls_ahead)
    assert (ahead, done) == ({"dp": 4}, {})


def _seen() -> tuple[str, bool, str]:
    """A rank that waits in an all-reduce, as another thread of it sees it."""
    mesh = Mesh({"dp": 2})
    dp, seen = mesh.axis("dp"), list[tuple[str, bool, str]]()

    def look() -> None:
        while not seen or "all_reduce_" not in seen[-1][2]:
            own = position.position(mesh, "h", dist.get_rank(), "step 1", False, {}, None)
            seen.append((own.waits, own.waiting, own.code))
            time.sleep(0.01)
        job_store().clone().set("seen", "")

    if dist.get_rank() == 1:
        job_store().wait(["seen"])
        all_reduce_(torch.ones(4), dp)
        return "", False, ""
    looking = threading.Thread(target=look)
    looking.start()
    all_reduce_(torch.ones(4), dp)
    looking.join()
    return seen[-1]


def test_another_thread_sees_in_which_group_a_rank_waits() -> None:
    with plain_groups():
        (group, waiting, code), _ = run_ranks(2, _seen)
    assert (group, waiting) == ("dp", True)
    assert "all_reduce_ (collectives.py:" in code


@pytest.mark.parametrize(("dp", "found"), [(4, True), (2, True), (3, False)])
def test_calls_have_names_on_each_size_of_an_elastic_mesh(
    dp: int, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its list of calls is in plan.json, with that of the largest."""
    plan = load(Path(__file__).parents[3] / "plans/tiny_elastic.scale")
    written = emit(compile_plan(plan), plan)["plan.json"]
    (tmp_path / "plan.json").write_text(written)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    listed = json.loads(written)
    sizes = {each["mesh"]["dp"]: listed | each for each in (listed, *listed["smaller"])}
    mesh: Any = SimpleNamespace(axes={"dp": dp, "tp": 2}, watch=None)
    made = [*position.order(mesh, False)()]
    assert bool(made) == found
    assert made == ([*get_planned_calls(sizes[dp], False, None)] if found else [])
