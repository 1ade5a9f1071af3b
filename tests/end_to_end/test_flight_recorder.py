"""The record of torch's Flight Recorder equals plan.json: op, group, bytes, count; forward,
backward and around.

A second means beside `test_recorded.py`: it sits in the backend, below torch's dispatcher.  It
knows no reductions, and gloo does a reduce-scatter as an all-reduce of the same size.
"""

import importlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.forked_ranks import run_ranks
from helpers.oracle import harness, reference
from helpers.oracle.plans import Case, plan_text
from helpers.programs import write_program
from scalec.runtime import Mesh

c10d: Any = importlib.import_module("torch._C._distributed_c10d")  # torch's stubs do not know it

Call = tuple[str, str, tuple[int, ...], int]  # where, op as gloo runs it, ranks of the group, bytes
CASES = [
    Case(dp=2, clip=1.0),
    Case(dp=2, tp=2, sp=True, gathered="regather", microbatches=2, precision="fp32"),
    Case(tp=4, sp=True, kv=2, gathered="regather", model="tied"),
    Case(replicas=2, tp=2, sp=True, vocab=False, model="parallel"),
    pytest.param(
        Case(dp=2, tp=4, sp=True, kv=2, gathered="regather", model="tied"), marks=pytest.mark.long
    ),
    pytest.param(
        Case(replicas=2, dp=2, tp=2, sp=True, vocab=False, model="parallel"), marks=pytest.mark.long
    ),
]
BYTES = {"i64": 8, "f64": 8, "f32": 4, "bf16": 2, "Long": 8, "Double": 8, "Float": 4, "BFloat16": 2}
ON_GLOO = {"all_reduce": "all_reduce", "reduce_scatter": "all_reduce", "all_gather": "all_gather"}


@pytest.fixture
def named_groups() -> Iterator[None]:
    """Forked ranks with groups that the Flight Recorder knows by name: DETAIL hides them behind
    a wrapper.
    """
    level = c10d.get_debug_level()
    c10d.set_debug_level(c10d.DebugLevel.OFF)
    yield
    c10d.set_debug_level(level)


@pytest.mark.sample(2)
@pytest.mark.usefixtures("named_groups")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_recorded_collectives_are_those_of_the_plan(case: Case, tmp_path: Path) -> None:
    module = harness.load_case(case, tmp_path)
    plan = json.loads((tmp_path / "plan.json").read_text())
    start, (batch,) = reference.initial(case.config), harness.batches(case, 1)
    ranks = run_ranks(case.ranks, _recorded, module, start, batch)
    for rank, calls in enumerate(ranks):
        assert calls == _expected(plan, rank)


def test_the_decoder_layer_communicates_as_megatron_does(tmp_path: Path) -> None:
    """Per layer and pass: 2 all-reduces; with SP 2 of each kind; 2 gathers more to regather;
    half for GPT-J's block.
    """

    def per_layer(**settings: Any) -> Counter[tuple[str, str]]:
        write_program(plan_text(Case(tp=2, **settings)), tmp_path)
        listed = json.loads((tmp_path / "plan.json").read_text())["collectives"]
        # there are two layers
        return Counter((each["where"], each["op"]) for each in listed if each["count"] == 2)

    assert per_layer() == {("forward", "all_reduce"): 2, ("backward", "all_reduce"): 2}
    both = {
        (where, op): 2
        for where in ("forward", "backward")
        for op in ("all_gather", "reduce_scatter")
    }
    assert per_layer(sp=True) == both
    assert per_layer(sp=True, gathered="regather") == {**both, ("backward", "all_gather"): 4}
    assert per_layer(model="parallel") == {
        ("forward", "all_reduce"): 1,
        ("backward", "all_reduce"): 1,
    }


# ---- what plan.json says


def _expected(plan: dict[str, Any], rank: int) -> Counter[Call]:
    calls = Counter[Call]()
    for each in plan["collectives"]:
        assert each["bytes"] == prod(each["shape"]) * BYTES[each["dtype"]]
        group = _peers(plan["mesh"], each["axes"], rank)
        assert len(group) == each["ranks"]
        calls[each["where"], ON_GLOO[each["op"]], group, each["bytes"]] += each["count"]
    return Counter({call: count for call, count in calls.items() if len(call[2]) > 1})


def _peers(mesh: dict[str, int], axes: list[str], rank: int) -> tuple[int, ...]:
    """The ranks that differ from this one in `axes` only."""
    places = list(product(*(range(size) for size in mesh.values())))
    fixed = [i for i, name in enumerate(mesh) if name not in axes]
    return tuple(
        r for r, place in enumerate(places) if all(place[i] == places[rank][i] for i in fixed)
    )


# ---- what a rank records


def _recorded(module: ModuleType, start: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Any:
    mesh = Mesh(module.PLAN.mesh)
    model, state = module.build(mesh)
    harness.fill(state, start)
    own = harness.local_batch(module.PLAN, *batch)
    module.train_step(model, state, own, 0.01)  # the first step also makes groups
    phases = _Phases(model)
    module.train_step(model, state, own, 0.01)
    return phases.calls()


def _entries() -> list[dict[str, Any]]:
    return json.loads(c10d._dump_fr_trace_json()).get("entries", [])


class _Phases:
    """Which recorded calls were made within the model's forward, within backward, and outside
    both.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._first = len(_entries())
        self._spans: list[tuple[str, int, int]] = []
        model.forward = self._spanning("forward", model.forward)
        # this process ends with the test
        torch.Tensor.backward = self._spanning("backward", torch.Tensor.backward)

    def _spanning(self, where: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            began = len(_entries())
            result = function(*args, **options)
            self._spans.append((where, began, len(_entries())))
            return result

        return run

    def calls(self) -> Counter[Call]:
        names = dist.distributed_c10d._world.pg_names
        groups = {
            str(name): tuple(dist.get_process_group_ranks(group)) for group, name in names.items()
        }
        entries = _entries()
        assert [entry["record_id"] for entry in entries] == list(range(len(entries))), (
            "the recorder's buffer ran over"
        )
        return Counter(self._call(i, entries[i], groups) for i in range(self._first, len(entries)))

    def _call(self, index: int, entry: dict[str, Any], groups: dict[str, tuple[int, ...]]) -> Call:
        where = next(
            (where for where, began, ended in self._spans if began <= index < ended), "step"
        )
        ((shape,), (dtype,)) = entry["input_sizes"], entry["input_dtypes"]
        op = entry["profiling_name"].removeprefix("gloo:")
        return where, op, groups[entry["process_group"][0]], prod(shape) * BYTES[dtype]
