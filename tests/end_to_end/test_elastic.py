"""Runs of elastic plans that go on with fewer ranks, and with ranks to spare: their losses and state are those of a run
that nothing disturbs, to rounding, and what they communicate is their plan."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.forked_ranks import plain_groups
from helpers.launched import run_file, text_files
from helpers.oracle import harness
from helpers.oracle.plans import Case, plan_text
from scalec.compiler.proof.recorded import compare
from scalec.runtime.checkpoint.reader import Saved

STEPS, HALF = 4, 2
RUN = Path("runs", "tiny")
CASES = {
    "zero_1": (Case(dp=4, optimizer="groups", clip=1.0, state="zero 1 over dp"), {3: 2, 1: 1}),
    "zero_3": (Case(dp=2, tp=2, sp=True, microbatches=2, clip=1.0, state="zero 3 over dp"), {3: 2}),
    "zero_2": (Case(dp=2, cp=2, optimizer="adamw", recompute="full", state="zero 2 over dp, cp"), {2: 2}),
    "hybrid": (Case(dp=2, cp=2, optimizer="momentum", state="zero 3 over cp"), {3: 2}),
    "fp16": (Case(dp=4, optimizer="adamw", state="zero 1 over dp", precision="fp16"), {3: 2}),
}
"""Plans on four ranks, whose axis dp may have any size; how many ranks are left, and for how many there is a place."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_with_the_ranks_that_are_left(name: str, tmp_path: Path) -> None:
    case, left = CASES[name]
    text = plan_text(case).replace(f"dp = {case.dp}", f"dp = 1..{case.dp}")
    whole = harness.written(text, tmp_path / "whole")
    _run(whole, 4, 4)
    for world, places in left.items():
        other = harness.written(text, tmp_path / f"{world}")
        middle = RUN / "checkpoints" / f"step-{HALF:06}"
        shutil.copytree(whole / middle, other / middle)
        with plain_groups():
            _run(other, world, places, "--resume", record="1")
        rel = 1e-2 if case.precision == "fp16" else 1e-9
        for got, want in zip(_log(other), _log(whole)[HALF:], strict=True):
            assert got == pytest.approx(want, rel=rel)
        (found, want) = (_state(folder) for folder in (other, whole))
        assert found.keys() == want.keys()
        for key, value in want.items():
            torch.testing.assert_close(found[key], value, rtol=rel, atol=rel / 100)
        recorded = compare(other / RUN / "recorded")
        assert recorded.equal, recorded.lines()
        assert recorded.ranks == places


def _run(folder: Path, world: int, places: int, more: str = "", record: str = "") -> None:
    """All ranks end well, spare ones too; the first names them, and the mesh if it is not the largest."""
    text_files(folder)
    options = f"--device=cpu --steps {STEPS} --save-every {HALF} --log-every 1 --eval-every 1000 --data text/*.txt"
    ended = run_file(folder, world, f"{options} {more}", record)
    assert [status for status, _ in ended] == [0] * world, ended
    said = ended[0][1]
    assert ("a step, in place of dp" in said) == (places < 4), said
    assert (f"rank {places} stands by" in said) == (places < world), said


def _log(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / RUN / "log.jsonl").read_text().splitlines())
    keys = ("step", "loss", "norm", "lr", "tokens")
    return [{key: line.get(key) for key in keys} for line in lines if "loss" in line]


def _state(folder: Path) -> dict[str, torch.Tensor]:
    saved = Saved(folder / RUN / "checkpoints" / f"step-{STEPS:06}")
    return saved.whole([*saved.tensors()])
