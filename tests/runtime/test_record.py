"""What SCALEC_RECORD=1 writes of a small hand-written program, and that it changes nothing."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

from ranks import run_ranks
from scalec.runtime import (
    AdamW,
    Batch,
    Constant,
    Group,
    Input,
    Mesh,
    Metrics,
    Plan,
    State,
    Text,
    all_reduce,
    all_reduce_,
    count_valid,
    cross_entropy,
    embedding,
    normal,
    weight,
)
from scalec.runtime.record import Recorder
from started import run_recorded, text_files

ROWS = Input(("batch", "seq"), {"batch": ("dp",)})
PLAN = Plan(
    name="bigram",
    mesh={"dp": 2},
    data=Text(("text/*.txt",), holdout=0.5),
    inputs={"tokens": ROWS, "labels": ROWS},
    vocab=32,
    seq=8,
    global_batch=500,  # of which the held-out file has one batch
    microbatches=1,
    steps=2,
    seed=0,
    lr=0.1,
    schedule=Constant(warmup=0),
)
RUN = Path("runs/bigram")


class _Bigram(nn.Module):
    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.table = weight(mesh, 32, 32, init=normal(0.02))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(embedding(tokens, self.table), labels)


def _build(mesh: Mesh) -> tuple[nn.Module, State]:
    model = _Bigram(mesh)
    return model, State(model, mesh, {"dp": (Group("table"),)}, AdamW())


def _train_step(model: nn.Module, state: State, batch: Batch, lr: float) -> Metrics:
    dp = state.mesh.axis("dp")
    count = all_reduce_(count_valid(batch.labels), dp)
    loss = model(*next(batch.microbatches())) / count
    loss.backward()
    all_reduce_(state.gradients()["dp"], dp)
    state.update(lr, skip=count == 0)
    return Metrics(loss=loss.detach(), tokens=count)


def _eval_step(model: nn.Module, mesh: Mesh, batch: Batch) -> Metrics:
    count = all_reduce_(count_valid(batch.labels), mesh.axis("dp"))
    return Metrics(loss=all_reduce(model(*next(batch.microbatches())), mesh.axis("dp")) / count, tokens=count)


def _failing_step(model: nn.Module, state: State, batch: Batch, lr: float) -> Metrics:
    if state.mesh.axis("dp").rank == 1:
        raise ValueError("a rank has a bad day")
    return _train_step(model, state, batch, lr)


def _run(folder: Path, step: Any = _train_step, options: str = "", record: str = "1") -> list[int]:
    text_files(folder)
    options = f"--data text/*.txt --log-every 1 {options}"
    return [status for status, _ in run_recorded(folder, PLAN, _build, step, _eval_step, options, record)]


def _lines(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    path = folder / RUN / f"recorded/rank{rank:05}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def _losses(folder: Path) -> list[tuple[Any, ...]]:
    lines = [json.loads(line) for line in (folder / RUN / "log.jsonl").read_text().splitlines()]
    return [tuple(value for name, value in line.items() if name != "tokens_per_s") for line in lines]


def test_what_is_written(tmp_path: Path) -> None:
    assert _run(tmp_path) == [0, 0]
    for rank in (0, 1):
        origin, *lines = _lines(tmp_path, rank)
        assert origin == {
            "plan": "bigram",
            "mesh": {"dp": 2},
            "world": 2,
            "rank": rank,
            "run": "",
            "torch": torch.__version__,
            "backend": "gloo",
        }
        steps = [line for line in lines if line["phase"] != "loop"]
        summed = {"op": "all_reduce", "reduction": "sum", "group": [0, 1]}
        count = summed | {"shape": [], "dtype": "int64"}
        for step, began in ((1, 0), (2, 2)):
            assert steps[3 * step - 3 : 3 * step] == [
                {"step": step, "phase": "train", "order": began} | count,
                {"step": step, "phase": "train", "order": began + 1} | summed | {"shape": [1024], "dtype": "float32"},
                {"step": step, "phase": "train", "calls": 2},
            ]
        assert steps[6:] == [
            {"step": 2, "phase": "evaluate", "order": 4} | count,
            {"step": 2, "phase": "evaluate", "order": 5} | summed | {"shape": [], "dtype": "float32"},
            {"step": 2, "phase": "evaluate", "calls": 2},
        ]
        saving = [line for line in lines if line["phase"] == "loop"]
        assert [line["order"] for line in saving] == list(range(6, 6 + len(saving)))
        assert {line["op"] for line in saving} > {"c10d::barrier", "c10d::broadcast_"}


@pytest.mark.parametrize("record", ["", "0"])
def test_it_is_off_unless_asked_for_and_on_it_changes_no_bit(record: str, tmp_path: Path) -> None:
    assert _run(tmp_path / "off", record=record) == [0, 0]
    assert not (tmp_path / "off" / RUN / "recorded").exists()
    assert _run(tmp_path / "on") == [0, 0]
    assert len(_losses(tmp_path / "on")) == 3
    assert _losses(tmp_path / "off") == _losses(tmp_path / "on")


def test_off_it_is_not_imported() -> None:
    command = "import sys, scalec.runtime; sys.exit('scalec.runtime.record' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0


def test_a_crash_loses_nothing_and_shows_the_call_that_waits(tmp_path: Path) -> None:
    assert _run(tmp_path, _failing_step) == [1, 1]
    waits, failed = _lines(tmp_path, 0), _lines(tmp_path, 1)
    assert [line.get("order") for line in waits] == [None, 0]
    assert len(failed) == 1


def test_a_resumed_run_records_its_own_steps(tmp_path: Path) -> None:
    assert _run(tmp_path) == [0, 0]
    assert _run(tmp_path, options="--resume --steps 3") == [0, 0]
    assert [line["step"] for line in _lines(tmp_path) if line.get("phase") == "train"] == [3, 3, 3]


# ---- whoever calls


def _recorded(folder: Path, function: Any) -> list[dict[str, Any]]:
    with Recorder(folder, PLAN, 0) as recorder:
        recorder.of("train", function)()
    lines = (folder / f"rank{dist.get_rank():05}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[1:]]


def _by_other_means(folder: Path) -> list[tuple[Any, ...]]:
    group = dist.group.WORLD
    assert group is not None
    x = torch.ones(4, 2)

    def step() -> None:
        for made in (
            functional.all_reduce(x, "max", group),
            functional.all_gather_tensor(x, 0, group),
            functional.reduce_scatter_tensor(x, "sum", 0, group),
            functional.all_to_all_single(x, None, None, group),
        ):
            functional.wait_tensor(made)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        dist.all_to_all_single(torch.empty_like(x), x)
        dist.broadcast(x, 0)

    fields = ("op", "reduction", "group", "shape", "dtype")
    return [tuple(line.get(name) for name in fields) for line in _recorded(folder, step)]


def test_calls_by_other_means_than_the_coercions_are_seen(tmp_path: Path) -> None:
    both, f32 = [0, 1], "float32"
    for calls in run_ranks(2, _by_other_means, tmp_path):
        assert calls[:-1] == [
            ("all_reduce", "max", both, [4, 2], f32),
            ("all_gather", "", both, [4, 2], f32),
            ("reduce_scatter", "sum", both, [4, 2], f32),
            ("all_to_all", "", both, [4, 2], f32),
            ("all_reduce", "max", both, [4, 2], f32),
            ("all_to_all", "", both, [4, 2], f32),
            ("c10d::broadcast_", "", both, [4, 2], f32),
        ]
