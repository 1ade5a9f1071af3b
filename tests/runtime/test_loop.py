"""Whole runs of a small hand-written program: what is printed, logged and saved, and how runs end."""

import json
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bigram import PLAN, build, eval_step, failing_step, train_step
from scalec.runtime import (
    Batch,
    Metrics,
    Plan,
    State,
    train,
)
from scalec.runtime.saved import Saved

ALONE = replace(PLAN, mesh={"dp": 1})


def _diverging_step(model: nn.Module, state: State, batch: Batch, lr: float) -> Metrics:
    return replace(train_step(model, state, batch, lr), norm=torch.tensor(torch.inf))


@dataclass(frozen=True)
class _Ended:
    status: int
    out: str
    err: str


def _program(plan: Plan, step: Callable[..., Metrics], folder: Path, environment: dict[str, str], options: str) -> None:
    """In a forked process: the program as a launcher starts it."""
    for number, stream in enumerate(("out", "err"), start=1):
        os.dup2(os.open(folder / f"{stream}{environment['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.chdir(folder)
    os.environ.update(environment)
    sys.argv = ["train.py", *options.split()]
    status = 0
    try:
        train(plan, build, step, eval_step)
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run(
    folder: Path, plan: Plan, options: str = "", step: Callable[..., Metrics] = train_step, world: int | None = None
) -> list[_Ended]:
    """How each rank ended."""
    world = world or plan.mesh["dp"]
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
    counts = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    ranks = [
        multiprocessing.get_context("fork").Process(
            target=_program,
            args=(plan, step, folder, {**address, **counts, "RANK": str(rank), "LOCAL_RANK": str(rank)}, options),
        )
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
        rank.kill()
        rank.join()
    texts = [((folder / f"out{rank}").read_text(), (folder / f"err{rank}").read_text()) for rank in range(world)]
    return [_Ended(rank.exitcode or 0, out, err) for rank, (out, err) in zip(ranks, texts, strict=True)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with two text files."""
    (tmp_path / "text").mkdir()
    for name, word in (("a", "abcdefgh "), ("b", "acegbdfh ")):
        (tmp_path / "text" / f"{name}.txt").write_text(word * 40)
    return tmp_path


def _records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "runs/bigram/log.jsonl").read_text().splitlines()]


def _weights(folder: Path, step: int) -> Tensor:
    values = {"table": torch.zeros(256, 256), "optimizer/exp_avg_sq/table": torch.zeros(256, 256)}
    Saved(folder / f"runs/bigram/checkpoints/step-{step:06d}").fill(values)
    return torch.stack(list(values.values()))


def test_a_run_says_logs_and_saves_what_it_did(folder: Path) -> None:
    first, second = _run(folder, PLAN, "--log-every 2 --eval-every 3 --steps 5 --data text/*.txt --lr 0.1")
    assert (first.status, second.status) == (0, 0), first.err + second.err
    assert second.out == ""
    assert "step 2/5  loss " in first.out
    assert "tokens/s" in first.out
    assert (
        "  train on    torchrun --standalone --nproc-per-node=2 train.py --resume --steps 10"
        " --log-every 2 --eval-every 3 --data 'text/*.txt' --lr 0.1\n"
    ) in first.out
    records = _records(folder)
    assert [record["step"] for record in records if "loss" in record] == [2, 4, 5]
    assert [record["step"] for record in records if "validation" in record] == [3, 5]
    losses = [record["loss"] for record in records if "loss" in record]
    assert 5.6 > losses[0] > losses[1] > losses[2]
    assert (folder / "runs/bigram/checkpoints/step-000005").is_dir()


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(folder: Path, tmp_path: Path) -> None:
    assert _run(folder, ALONE, "--save-every 2")[0].status == 0
    whole = _weights(folder, 4)
    (folder / "runs/bigram/checkpoints/step-000004").rename(folder / "kept")  # as if killed between 2 and 4
    (resumed,) = _run(folder, ALONE, "--resume")
    assert "resuming from runs/bigram/checkpoints/step-000002" in resumed.out
    assert torch.equal(_weights(folder, 4), whole)


def test_a_new_run_sets_the_earlier_one_aside(folder: Path) -> None:
    _run(folder, ALONE)
    _run(folder, ALONE, "--steps 2")
    run = folder / "runs/bigram"
    assert (run / "earlier-1/checkpoints/step-000004").is_dir()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000002"]


@pytest.mark.parametrize(
    ("plan", "options", "line"),
    [
        (
            ALONE,
            "",
            "the plan's mesh, dp 1, takes 1 ranks, not 2; start it with: python train.py",
        ),
        (PLAN, "--data a/*.txt", "no data: `a/*.txt` matches no file that holds anything, looked for in CWD"),
        (PLAN, "--data /nothing/*.txt", "no data: `/nothing/*.txt` matches no file that holds anything"),
        (PLAN, "--resume", "nothing to resume: no checkpoint in runs/bigram/checkpoints"),
        (replace(PLAN, seq=999), "", "too little data: 360 tokens in 1 files are less than a window of 1000"),
    ],
)
def test_what_cannot_start_says_why_in_one_line_on_rank_0(folder: Path, plan: Plan, options: str, line: str) -> None:
    first, second = _run(folder, plan, options, world=2)
    assert (first.status, second.status) == (2, 2)
    assert first.err == f"error: {line.replace('CWD', str(folder))}\n"
    assert second.err == second.out == first.out == ""


def test_a_rank_that_fails_ends_the_job(folder: Path) -> None:
    began = time.monotonic()
    first, second = _run(folder, PLAN, step=failing_step)
    assert first.status == second.status == 1
    assert second.err.startswith("rank 1 failed\nTraceback")
    assert second.err.count("a rank has a bad day") == 2  # in its traceback's last frame and its last line
    assert "Traceback" not in first.err  # it only lost its peer
    assert time.monotonic() - began < 15


def test_a_loss_or_norm_that_is_not_finite_stops_the_run(folder: Path) -> None:
    (ended,) = _run(folder, ALONE, "--log-every 1", step=_diverging_step)
    assert ended.status == 1
    assert ended.err.startswith("error: step 1: loss 5.")
    assert "norm inf" in ended.err
    assert not (folder / "runs/bigram/checkpoints").exists()
