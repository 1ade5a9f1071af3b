"""The order of calls that the watchdog reads from plan.json is the one against which `scalec
verify` holds records.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.oracle.plans import Case, plan_text
from scalec.compiler.emit.plan_json import plan_json
from scalec.compiler.proof.recorded.plan import get_expected_calls, peers
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan, lower
from scalec.runtime.train.watchdog.call_order import get_planned_calls
from scalec.runtime.train.watchdog.verdict import members

CASES = [
    Case(dp=2, tp=2, sp=True, gathered="regather", microbatches=2, optimizer="groups"),
    Case(dp=2, state="zero 3 over dp", microbatches=2),
    Case(dp=4, model="biased", experts="dp", optimizer="groups", state="zero 2 over dp"),
    Case(
        pp=2,
        dp=2,
        microbatches=2,
        optimizer="groups",
        clip=1.0,
        model="tied",
        schedule="zbv",
        state="zero 1 over dp",
    ),
]
PLANS = Path(__file__).parents[3] / "plans"


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_calls_are_those_of_records(case: Case) -> None:
    plan = _plan(Source("tiny.scale", plan_text(case)))
    assert sum(_compared(plan, rank) for rank in range(case.ranks)) > 0


def test_a_plan_with_all_five_axes() -> None:
    path = PLANS / "tiny_five.scale"
    plan = _plan(Source(str(path), path.read_text()))
    assert sum(_compared(plan, rank) for rank in (0, 15)) > 0


def test_files_of_schema_1_are_read() -> None:
    """They call the layers of a stage `turns`."""
    plan = _plan(Source("tiny.scale", plan_text(CASES[-1])))
    stages = [
        {"rank": stage["rank"], "turns": stage["layers"]} for stage in plan["pipeline"]["stages"]
    ]
    earlier = {**plan, "pipeline": {**plan["pipeline"], "stages": stages}}
    assert [*get_planned_calls(earlier, False, 0)] == [*get_planned_calls(plan, False, 0)]
    assert get_expected_calls(earlier, 0) == get_expected_calls(plan, 0)


def _plan(source: Source) -> dict[str, Any]:
    model = compile_plan(source, "resolve")
    return json.loads(plan_json(lower(model), source, model, None, 0, {}))


def _compared(plan: dict[str, Any], rank: int) -> int:
    """How many calls of a rank are the same in both readings: all."""
    place = (
        peers(plan["mesh"], [plan["pipeline"]["axis"]], rank).index(rank)
        if "pipeline" in plan
        else None
    )
    number = 0
    for phase, calls in get_expected_calls(plan, rank).items():
        found = [*get_planned_calls(plan, phase == "evaluate", place)]
        assert [(each.value, each.line, each.where) for each in found] == [
            (each.value, each.line, each.where) for each in calls
        ]
        for each, call in zip(found, calls, strict=True):
            group = members(plan["mesh"], each.group, rank)
            assert (call.call.peer in group) if each.peer is not None else group == call.call.group
        number += len(found)
    return number


def test_a_call_in_words() -> None:
    """Layers count from 0, as modules of the model do, microbatches from 1, as in the
    sanitizer's reports.
    """
    plan = _plan(Source("tiny.scale", plan_text(CASES[0])))
    calls = [*map(str, get_planned_calls(plan, False, None))]
    assert calls[0] == "all_reduce of `num_tokens.1` over dp, tiny.scale:1"
    assert "all_gather of `a.1` over tp in forward, layers.1, microbatch 2, tiny.scale:10" in calls
    backward = [each for each in calls if "`d__y` " in each]
    assert [each.split(", ")[1:3] for each in backward] == [
        [f"layers.{layer}", f"microbatch {microbatch}"] for microbatch in (1, 2) for layer in (1, 0)
    ]


def test_gathers_that_begin_ahead_say_the_layer_they_are_for() -> None:
    plan = _plan(Source("tiny.scale", plan_text(CASES[1])))
    gathers = [
        each
        for each in get_planned_calls(plan, False, None)
        if each.op == "all_gather" and each.where == "forward"
    ]
    of_first = [each.layer for each in gathers if each.microbatch == 0]
    assert of_first == sorted(of_first)
    assert set(of_first) == {f"layers.{layer}" for layer in range(plan["dims"]["layers"])}
