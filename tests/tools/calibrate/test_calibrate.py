"""A calibration: the file reads back as hardware, by which each measured row takes what was
measured.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.forked_ranks import plain_groups, run_ranks
from scalec.compiler.analysis.hardware import Hardware, load
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan
from scalec.tools.calibrate import calls, clock
from scalec.tools.calibrate.__main__ import main
from scalec.tools.calibrate.clock import Clock
from scalec.tools.calibrate.figures import text
from scalec.tools.calibrate.links import OPS, Links
from scalec.tools.calibrate.work_list import work_list

PLAN = """model tiny(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 16  hidden = 8  heads = 2  head_dim = 4 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  n = rmsnorm(x, norm[hidden], 1e-5)
  q = rope(n @ wq[hidden -> heads, head_dim], 10000)
  x = x + attention(q, q, q, mask=causal) @ wo[heads, head_dim -> hidden]
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
mesh { dp = 2  tp = 2 }
shard { batch over dp  heads over tp }
train {
  seq = 16  global_batch = 4  microbatch = 2  steps = 1
  optimizer adamw { lr = 0.1 }
  data text { files = ["a"] }
}
"""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "REPEATS", 2)
    monkeypatch.setattr(calls, "NEAR", 1)
    monkeypatch.setattr(clock, "CACHE", 1)


@pytest.fixture(scope="module")
def listed() -> dict[str, Any]:
    return json.loads(work_list([compile_plan(Source("tiny.scale", PLAN))]))


@pytest.fixture
def measured(listed: Mapping[str, Any], tmp_path: Path) -> tuple[Hardware, str]:
    (tmp_path / "list.json").write_text(json.dumps(listed))
    file = tmp_path / "mine.toml"
    assert main([str(tmp_path / "list.json"), "-o", str(file), "--warm-up", "0"]) == 0
    return load(file), file.read_text()


def test_a_calibrated_file_reads_back_and_each_row_takes_what_was_measured(
    measured: tuple[Hardware, str],
) -> None:
    on, _ = measured
    assert (on.name, on.synchronous, on.source) == ("cpu", True, "mine.toml")
    assert on.measured.products
    assert on.measured.attention
    assert {it.op for it in on.measured.moved} >= {
        "rmsnorm",
        "vjp rmsnorm x",
        "rope",
        "update",
        "accumulate",
        "add",
    }
    for it in on.measured.products:
        assert on.measured.product(it.dtype, it.m, it.n, it.k, it.batch) == it.seconds
    for it in on.measured.moved:
        assert on.measured.seconds_of(it.op, it.bytes) == pytest.approx(it.seconds)
    for it in on.measured.attention:
        rates = (
            on.measured.attention_rate(it.kernel, it.width, it.length, backward=back)
            for back in (False, True)
        )
        assert [*rates] == pytest.approx([it.forward, it.backward])


def test_casts_of_a_plan_in_bf16_are_measured(tmp_path: Path) -> None:
    half = compile_plan(
        Source("half.scale", PLAN.replace("steps = 1", "steps = 1  precision = bf16"))
    )
    listed = json.loads(work_list([half]))
    casts = [it for it in listed["calls"] if it["row"].get("op") == "cast"]
    # gradients are added to wider sums as they are
    assert {it["call"] for it in casts} == {"x0.bfloat16()"}
    (tmp_path / "list.json").write_text(json.dumps(listed))
    assert (
        main([str(tmp_path / "list.json"), "-o", str(tmp_path / "half.toml"), "--warm-up", "0"])
        == 0
    )
    assert {it["row"]["bytes"] for it in casts} <= {
        it.bytes for it in load(tmp_path / "half.toml").measured.moved
    }


def test_the_file_says_with_what_it_was_measured(measured: tuple[Hardware, str]) -> None:
    assert measured[1].startswith("# Written by scalec ")
    assert torch.__version__ in measured[1].splitlines()[0]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_groups_of_ranks_are_measured_alone_and_together(
    listed: Mapping[str, Any], ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with plain_groups():
        rows, *_ = run_ranks(ranks, _links, listed)
    groups = {(it["op"], it["ranks"]) for it in rows}
    several = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    sizes = (2, 4) if ranks == 4 else (2,)  # two nodes of two ranks
    assert groups == {("send", 2), *((op, size) for op in several for size in sizes)}
    assert {it["bytes"] for it in rows} == {4096, 16384}
    (tmp_path / "links.toml").write_text(
        '[cluster]\ngpu = "a100_80gb"\n\n' + text([], {}, [], rows)
    )
    on = load(tmp_path / "links.toml")
    for it in on.measured.collectives:
        assert on.measured.collective(it.op, it.ranks, it.nodes, it.bytes) == pytest.approx(
            it.seconds
        )


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_messages_go_from_the_first_half_of_a_group_to_the_second(ranks: int) -> None:
    """So of two nodes' ranks all cross from one node to the other."""
    told, device = list[tuple[str, int, int]](), torch.device("cpu")

    class Group:
        def __init__(self, rank: int) -> None:
            self.own = rank

        def rank(self) -> int:
            return self.own

        def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
            told.append(("send", self.own, to))
            return SimpleNamespace(wait=lambda: None)

        def recv(self, tensors: list[torch.Tensor], of: int, tag: int) -> Any:
            told.append(("recv", of, self.own))
            return SimpleNamespace(wait=lambda: None)

    for rank in range(ranks):
        OPS["send"](Group(rank), device, ranks, 4096)()
    pairs = [(at, at + ranks // 2) for at in range(ranks // 2)]
    assert sorted(told) == sorted((kind, *pair) for kind in ("send", "recv") for pair in pairs)


def _links(listed: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = Links(listed, Clock(torch.device("cpu")), 16384)
    found.measure()
    assert found.issue_times
    assert min(found.issue_times) > 0
    return found.rows


def test_rows_of_experts_and_positions_of_a_rank_are_measured_too() -> None:
    plans = Path(__file__).parents[3] / "plans"
    experts = f'use "{plans}/tiny_five.scale"'
    gather = PLAN.replace("shard {", "shard { seq over cp as zigzag via gather ").replace(
        "dp = 2  tp", "dp = 2  cp = 2  tp"
    )
    listed = json.loads(
        work_list([compile_plan(Source("t.scale", it)) for it in (experts, gather)])
    )
    asked = [
        it
        for it in listed["calls"]
        if {"layout", "made"} & {key for of in it["inputs"].values() for key in of}
    ]
    found = [*calls.rows(asked, Clock(torch.device("cpu")))]
    assert {row.get("op", row["table"]) for row in found} == {
        *(
            "sort_by_expert",
            "dispatch",
            "vjp dispatch x",
            "combine",
            "vjp combine rows gates",
            "attention",
        ),
    }
    assert all(row["seconds"] > 0 for row in found)


def test_the_host_takes_some_time_to_issue_an_op(listed: Mapping[str, Any]) -> None:
    assert 0 < calls.median_issue_seconds(listed["calls"], Clock(torch.device("cpu"))) < 1


def test_plans_for_a_gpu_are_measured_where_there_is_one(
    listed: Mapping[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "list.json").write_text(json.dumps({**listed, "device": "cuda"}))
    assert main([str(tmp_path / "list.json"), "-o", str(tmp_path / "mine.toml")]) == 1
    assert "this machine has none" in capsys.readouterr().err
    assert not (tmp_path / "mine.toml").exists()
