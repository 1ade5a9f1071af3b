"""The record (SCALEC_RECORD=1) of a small hand-written program, which it does not change."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from helpers import bigram
from helpers.bigram import build, eval_step, failing_step, train_step
from helpers.forked_ranks import run_ranks
from helpers.launched import run_recorded, text_files
from scalec.runtime import Constant
from scalec.runtime.debug.record import Recorder

PLAN = replace(bigram.PLAN, global_batch=444, steps=2, schedule=Constant(warmup=0))
"""Of which the held-out file has one batch."""
RUN = Path("runs/bigram")


def _run(folder: Path, step: Any = train_step, options: str = "", record: str = "1") -> list[int]:
    text_files(folder)
    options = f"--data text/*.txt --log-every 1 {options}"
    return [
        status for status, _ in run_recorded(folder, PLAN, build, step, eval_step, options, record)
    ]


def _lines(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    path = folder / RUN / f"recorded/rank{rank:05}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def _losses(folder: Path) -> list[tuple[Any, ...]]:
    lines = [json.loads(line) for line in (folder / RUN / "log.jsonl").read_text().splitlines()]
    return [
        tuple(value for name, value in line.items() if not name.startswith("tokens_per_s"))
        for line in lines
    ]


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
        loss = summed | {"shape": [], "dtype": "float32"}
        for step, began in ((1, 0), (2, 3)):
            assert steps[4 * step - 4 : 4 * step] == [
                {"step": step, "phase": "train", "order": began} | count,
                {"step": step, "phase": "train", "order": began + 1}
                | summed
                | {"shape": [65536], "dtype": "float32"},
                {"step": step, "phase": "train", "order": began + 2} | loss,
                {"step": step, "phase": "train", "calls": 3},
            ]
        assert steps[8:] == [
            {"step": 2, "phase": "evaluate", "order": 6} | count,
            {"step": 2, "phase": "evaluate", "order": 7} | loss,
            {"step": 2, "phase": "evaluate", "calls": 2},
        ]
        assert not [line for line in lines if line["phase"] == "loop"]  # saving asks the store


@pytest.mark.sample(1)
@pytest.mark.parametrize("record", ["", "0"])
def test_it_is_off_unless_asked_for_and_on_it_changes_no_bit(record: str, tmp_path: Path) -> None:
    assert _run(tmp_path / "off", record=record) == [0, 0]
    assert not (tmp_path / "off" / RUN / "recorded").exists()
    assert _run(tmp_path / "on") == [0, 0]
    assert len(_losses(tmp_path / "on")) == 3
    assert _losses(tmp_path / "off") == _losses(tmp_path / "on")


def test_off_it_is_not_imported() -> None:
    rarely = {f"scalec.runtime.debug.{name}" for name in ("record", "profile", "sanitize")}
    command = f"import sys, scalec.runtime; sys.exit(not {rarely}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0


def test_a_crash_loses_nothing_and_shows_the_call_that_waits(tmp_path: Path) -> None:
    assert _run(tmp_path, failing_step) == [1, 1]
    waits, failed = _lines(tmp_path, 0), _lines(tmp_path, 1)
    assert [line.get("order") for line in waits] == [None, 0]
    assert len(failed) == 1


def test_a_resumed_run_records_its_own_steps(tmp_path: Path) -> None:
    assert _run(tmp_path) == [0, 0]
    assert _run(tmp_path, options="--resume --steps 3") == [0, 0]
    assert [line["step"] for line in _lines(tmp_path) if line.get("phase") == "train"] == [
        3,
        3,
        3,
        3,
    ]


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
        parts = [4, 0] if dist.get_rank() else [0, 4]
        dist.all_to_all_single(torch.empty_like(x), x, parts, parts)
        dist.broadcast(x, 0)

    fields = ("op", "reduction", "group", "shape", "dtype", "splits")
    return [tuple(line.get(name) for name in fields) for line in _recorded(folder, step)]


def test_calls_by_other_means_than_the_coercions_are_seen(tmp_path: Path) -> None:
    both, f32 = [0, 1], "float32"
    for rank, calls in enumerate(run_ranks(2, _by_other_means, tmp_path, functional=True)):
        parts = [4, 0] if rank else [0, 4]
        assert calls[:-1] == [
            ("all_reduce", "max", both, [4, 2], f32, None),
            ("all_gather", "", both, [4, 2], f32, None),
            ("reduce_scatter", "sum", both, [4, 2], f32, None),
            ("all_to_all", "", both, [4, 2], f32, None),
            ("all_reduce", "max", both, [4, 2], f32, None),
            ("all_to_all", "", both, [4, 2], f32, None),
            ("all_to_all", "", both, [4, 2], f32, [parts, parts]),
            ("c10d::broadcast_", "", both, [4, 2], f32, None),
        ]
