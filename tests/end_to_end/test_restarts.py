"""Runs under torchrun that are killed, stopped by signals and started by the same line, lose
nothing.
"""

import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.launched import text_files
from helpers.oracle.plans import Case, plan_text
from helpers.programs import write_program
from scalec.runtime.checkpoint.reader import Saved
from scalec.runtime.train.options import SEPARATE_STORES
from scalec.testing.faults import (
    LAUNCHER,
    Action,
    Fault,
    Point,
    Program,
    Send,
    Slow,
    fork,
    kill,
    torchrun,
)

RUN = Path("runs", "tiny")
OPTIONS = "--device=cpu --steps=12 --save-every=2 --log-every=1 --data text/a.txt --resume auto"


@pytest.fixture
def program(tmp_path: Path) -> Program:
    folder = write_program(plan_text(Case(dp=2, microbatches=2)), tmp_path)
    text_files(folder)
    return Program(folder, 2, OPTIONS, launcher="--max-restarts=1")


def _steps(program: Program) -> list[int]:
    lines = (program.folder / RUN / "log.jsonl").read_text().splitlines()
    return [each["step"] for each in map(json.loads, lines) if "loss" in each]


def _weights(program: Program) -> torch.Tensor:
    saved = Saved(program.folder / RUN / "checkpoints" / "step-000012")
    return torch.cat([each.flatten() for each in saved.whole([*saved.tensors()]).values()])


def _undisturbed(program: Program) -> torch.Tensor:
    assert fork(program).wait().succeeded
    found = _weights(program)
    (program.folder / RUN).rename(program.folder / RUN.with_name("undisturbed"))
    return found


def test_a_killed_rank_is_one_restart(program: Program) -> None:
    wanted = _undisturbed(program)
    ended = torchrun(program, Fault(Point("step", 7, 1), kill())).wait()
    assert ended.statuses == (0,), ended.err
    assert len(ended.strikes) == 1
    begun = re.search(rf"resuming from {RUN}/checkpoints/step-00000(.)", ended.out[0])
    assert begun
    assert begun[1] in "46"  # the save after step 6 may have been under way
    assert _steps(program) == [*range(1, 13)]
    assert torch.equal(_weights(program), wanted)


@pytest.mark.long
@pytest.mark.parametrize(
    ("action", "status"),
    [
        (Send(signal.SIGTERM), 75),
        (Send(signal.SIGUSR1), 75),
        (Send(signal.SIGTERM, (LAUNCHER,)), 75),
        (Send(signal.SIGUSR1, (LAUNCHER,)), 75),
        (Send(signal.SIGINT, (LAUNCHER,)), 130),
        (kill(LAUNCHER), -signal.SIGKILL),
    ],
    ids=[
        "TERM rank",
        "USR1 rank",
        "TERM launcher",
        "USR1 launcher",
        "INT launcher",
        "KILL launcher",
    ],
)
def test_a_signal_ends_all_and_the_same_line_goes_on(
    action: Action, status: int, program: Program
) -> None:
    wanted = _undisturbed(program)
    slow = [Fault(Point("step", None, rank), Slow(0.5), times=9) for rank in range(2)]
    ended = torchrun(program, Fault(Point("step", 5, 1), action), *slow).wait()
    assert ended.statuses == (status,), ended.err
    if status > 0:
        last = max(_steps(program))
        assert 5 <= last < 12
        assert f"saved {RUN}/checkpoints/step-{last:06}\n" in ended.out[0]
    assert fork(program).wait().succeeded
    assert _steps(program) == [*range(1, 13)]
    assert torch.equal(_weights(program), wanted)


@pytest.mark.long
@pytest.mark.parametrize(
    "action", [Send(signal.SIGTERM), Send(signal.SIGTERM, (LAUNCHER,))], ids=["rank", "launcher"]
)
def test_a_stop_is_no_failure_to_torchs_own_torchrun(action: Action, program: Program) -> None:
    """Which ends with 1 in place of 75, and starts nothing anew."""
    wanted = _undisturbed(program)
    slow = [Fault(Point("step", None, rank), Slow(0.5), times=9) for rank in range(2)]
    name, _, value = SEPARATE_STORES.partition("=")
    plain = replace(program, environment={name: value})
    ended = torchrun(
        plain, Fault(Point("step", 5, 1), action), *slow, module="torch.distributed.run"
    ).wait()
    assert ended.statuses == (1,), ended.err
    assert "death signal" in ended.err[0]
    last = max(_steps(program))
    assert 5 <= last < 12
    assert ended.out[0].count(f"saved {RUN}/checkpoints/step-{last:06}\n") == 1
    assert fork(program).wait().succeeded
    assert torch.equal(_weights(program), wanted)
