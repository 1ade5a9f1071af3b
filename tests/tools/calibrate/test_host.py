"""A host's figures: emitted steps run without peers; ops and actions take the seconds that were
planted.
"""

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from helpers.programs import make_program
from scalec.tools.calibrate import clock, host
from scalec.tools.calibrate.clock import Clock
from scalec.tools.calibrate.host_steps import host_steps
from scalec.tools.calibrate.work_list import work_list

MODEL = """model tiny(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 16  hidden = 8  ffn = 16  layers = 4 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {
    x = x + silu(x @ w_in[hidden -> ffn]) @ w_out[ffn -> hidden]
  }
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
train {
  seq = 8  global_batch = 8  microbatch = 2  steps = 1
  optimizer adamw { lr = 0.1 }
  data text { files = ["a"] }
}
"""
SHARDED = "mesh { dp = 2  tp = 2 } shard { batch over dp  ffn over tp } state { zero 1 over dp }"
STAGED = "mesh { pp = 2  tp = 2 } shard { ffn over tp  layers over pp }"


@pytest.fixture(scope="module")
def steps() -> list[dict[str, Any]]:
    listed = host_steps(
        [make_program(MODEL + STAGED), make_program(MODEL + SHARDED), make_program(MODEL + "")]
    )
    return json.loads(json.dumps(listed))


def test_ops_and_actions_take_what_was_planted(
    steps: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps of the plan without a pipeline have another part in common."""
    assert [(it["actions"], *it["mesh"].values()) for it in steps] == [
        (0, 2, 2),
        (0, 2, 2),
        (8, 2, 2),
    ]
    assert steps[1]["ops"] > steps[0]["ops"]

    def planted(step: Mapping[str, Any], _: Clock) -> float:
        return step["ops"] * 5e-6 + step["actions"] * 7e-6 + (0 if step["actions"] else 1e-3)

    monkeypatch.setattr(host, "_seconds", planted)
    found = host.figures(steps, Clock(torch.device("cpu")), lambda: 1.0)
    assert found == pytest.approx({"op": 5e-6, "action": 7e-6})
    assert host.figures(steps[2:], Clock(torch.device("cpu")), lambda: 1e-6)["op"] == 1e-6


@pytest.mark.usefixtures("calls_uncompared")
def test_each_step_runs_on_one_rank(
    steps: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "REPEATS", 2)
    monkeypatch.setattr(clock, "CACHE", 1)
    found = host.figures(steps, Clock(torch.device("cpu")), lambda: 1e-6)
    assert {*found} == {"op", "action"}
    assert all(0 <= seconds < 1 for seconds in found.values())


def test_only_plans_for_a_gpu_list_steps() -> None:
    assert json.loads(work_list([make_program(MODEL + SHARDED)]))["steps"] == []
    listed = json.loads(work_list([make_program(MODEL + SHARDED + "\ncluster { gpu = h100_sxm }")]))
    assert [sorted(it) for it in listed["steps"]] == [
        ["actions", "files", "inputs", "mesh", "ops"]
    ] * 2
