"""Saves beside training of plans with every kind of state: it is that of the step, wherever
training is.
"""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.held_actions import Await, Leave
from helpers.launched import text_files
from helpers.oracle.plans import Case, plan_text
from helpers.programs import load_program, write_program
from helpers.small_log import small_log
from scalec.compiler.analysis.memory import accounts
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan
from scalec.runtime import Batch, Mesh
from scalec.runtime.checkpoint.reader import Saved
from scalec.runtime.checkpoint.saver import own_boxes
from scalec.runtime.train.watching import Watching
from scalec.testing.faults import Fault, Point, Program, fork, kill

SAVED, LAST = 2, 4
CHECKPOINTS = Path("runs", "tiny", "checkpoints")
OPTIONS = f"--device=cpu --log-every=1 --data text/a.txt --resume auto --steps={LAST}"
CASES = (
    Case(
        dp=2,
        ep=2,
        model="biased",
        experts="ep",
        state="zero 3 over dp, ep",
        optimizer="adamw",
        clip=0.5,
        precision="fp16",
        microbatches=2,
    ),
    Case(
        pp=2,
        dp=2,
        model="biased softmax",
        experts="dp",
        schedule="zbv",
        layers=4,
        state="zero 1 over dp",
        optimizer="groups",
        microbatches=2,
        precision="fp16",
    ),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES, ids=["experts, ZeRO 3", "experts, stages, ZeRO 1"])
def test_a_save_that_is_written_in_a_later_step_is_of_its_own(case: Case, tmp_path: Path) -> None:
    """The last rank's file is written when all are in the last step, in which they are killed
    once it is there.
    """
    plan = plan_text(case).replace("precision =", f"save_every = {SAVED}  precision =")
    folder = write_program(plan, tmp_path)
    text_files(folder)
    program = Program(folder, case.ranks, OPTIONS)
    assert fork(program).wait().succeeded
    wanted = {step: _state(folder, step) for step in (SAVED, LAST)}
    (folder / "runs").rename(folder / "undisturbed")
    begun = [folder / f"begun-{rank}" for rank in range(case.ranks)]
    saved = folder / CHECKPOINTS / f"step-{SAVED:06d}"
    faults = [Fault(Point("write", SAVED, case.ranks - 1), Await(file)) for file in begun]
    for rank, file in enumerate(begun):
        faults += [
            Fault(Point("step", LAST, rank), Leave(file)),
            Fault(Point("step", LAST, rank), Await(saved, kill())),
        ]
    ended = fork(program, *faults).wait()
    assert len(ended.strikes) == 3 * case.ranks, ended.err
    _assert_same(_state(folder, SAVED), wanted[SAVED])
    assert fork(program).wait().succeeded
    _assert_same(_state(folder, LAST), wanted[LAST])
    _assert_counted(ended.out[0], plan)


@pytest.mark.parametrize("watch", ["", "watch { skips = 1  spikes = skip(9) }"])
@pytest.mark.parametrize(
    "case",
    [Case(), Case(model="biased", optimizer="adamw", precision="fp16")],
    ids=["fp64", "fp16"],
)
def test_the_account_is_what_a_single_rank_copies(case: Case, watch: str, tmp_path: Path) -> None:
    text = plan_text(case) + watch
    plan = load_program(text, tmp_path)
    model, state = plan.build(Mesh(plan.PLAN.mesh))
    Watching(
        plan.PLAN.watch,
        model,
        state,
        plan.train_step,
        lambda _: Batch(*[torch.zeros(1)] * 2),
        small_log(None),
        {},
    )
    own = own_boxes(state)
    (counted,) = accounts(compile_plan(Source("tiny.scale", text)))
    assert counted.host == sum(box.tensor.nbytes for box in own.values())


def _state(folder: Path, step: int) -> dict[str, Tensor]:
    saved = Saved(folder / CHECKPOINTS / f"step-{step:06d}")
    return saved.whole([*saved.tensors()])


def _assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert {"optimizer/loss_scale", "optimizer/step"} < ours.keys() == theirs.keys()
    assert any(key.endswith("router_bias") and value.any() for key, value in ours.items())
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def _assert_counted(out: str, plan: str) -> None:
    """The copy takes what the account says, padding of buckets apart."""
    said = re.search(r"host memory, ([\d.]+) MiB", out)
    assert said
    most = max(it.host for it in accounts(compile_plan(Source("tiny.scale", plan))))
    assert most * 0.8 < float(said[1]) * 2**20 < most + 2**20 / 100
