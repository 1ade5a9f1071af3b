"""Runs that skip steps by rule: spikes of a corpus with noise in it, with a kill and a resume
between.
"""

import json
import signal
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.oracle.plans import SEQ, Case, plan_text
from helpers.programs import write_program
from scalec.runtime.checkpoint.reader import Saved
from scalec.testing.faults import Fault, Point, Program, fork, kill

CASES = [
    Case(dp=2, optimizer="adamw", precision="fp32", state="zero 1 over dp"),
    Case(pp=2, microbatches=2, optimizer="adamw", precision="fp32"),
    Case(dp=2, optimizer="adamw", precision="fp16", clip=1.0),
]
STEPS = 50
WATCH = "watch { skips = 2  spikes = skip(3) }\n"
NOISY = (30, 31, 70, 120)
"""The sequences of the corpus whose tokens follow no rule."""


def _program(case: Case, folder: Path, log_every: int) -> Program:
    write_program(plan_text(case) + WATCH, folder)
    rows = case.rows * STEPS // 2  # each is seen twice
    noise = torch.Generator().manual_seed(1)
    tokens = [
        torch.randint(32, (SEQ,), generator=noise).tolist() if row in NOISY else [*range(SEQ)]
        for row in range(rows)
    ]
    (folder / "corpus.bin").write_bytes(bytes([*chain(*tokens), 0]))
    options = (
        f"--steps={STEPS} --save-every=5 --log-every={log_every} --lr=0.02 --data=corpus.bin"
        " --resume=auto"
    )
    return Program(folder, case.ranks, f"--device=cpu {options}")


def _ended(folder: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """The records of steps, and the last state."""
    run = folder / "runs" / "tiny"
    records = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    saved = Saved(run / "checkpoints" / f"step-{STEPS:06d}")
    return [each for each in records if "account" not in each], saved.whole([*saved.tensors()])


@pytest.mark.sample(1)
@pytest.mark.parametrize(("case", "log_every"), [*zip(CASES, (7, 9, 9), strict=True)], ids=str)
def test_a_run_that_was_killed_skips_the_same_steps(
    case: Case, log_every: int, tmp_path: Path
) -> None:
    """One record for each, whether its line is due or not; killed in the step after the first
    that is skipped.
    """
    whole, cut = (_program(case, tmp_path / name, log_every) for name in ("whole", "cut"))
    assert fork(whole).wait(120).succeeded
    records, state = _ended(whole.folder)
    skipped = [each["step"] for each in records if each.get("skipped") and each["step"] > 16]
    assert skipped
    assert len({each["step"] for each in records}) == len(records)
    ended = fork(cut, Fault(Point("step", skipped[0] + 1), kill(*range(case.ranks)))).wait(120)
    assert ended.statuses[0] == -signal.SIGKILL
    assert fork(cut).wait(120).succeeded
    again, resumed = _ended(cut.folder)
    assert [each["step"] for each in again if each.get("skipped")] == [
        each["step"] for each in records if each.get("skipped")
    ]
    assert len({each["step"] for each in again}) == len(again)
    assert all(torch.equal(resumed[key], value) for key, value in state.items())
