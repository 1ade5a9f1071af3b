"""Biases of routers against the reference: loads and biases after each step, evaluation,
checkpoints.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from end_to_end.test_numbers import compare
from helpers.forked_ranks import run_ranks
from helpers.oracle import harness, reference
from helpers.oracle.plans import Case
from scalec.runtime import Mesh
from scalec.runtime.checkpoint import saver

CASES = (
    Case(model="biased", microbatches=2, valid="silent_microbatch"),
    Case(
        dp=2,
        ep=2,
        model="biased",
        experts="ep",
        state="zero 3 over dp, ep",
        optimizer="adamw",
        clip=0.05,
    ),
    Case(dp=2, tp=2, sp=True, model="biased", experts="dp, tp", recompute="full", microbatches=2),
    Case(
        dp=2, tp=2, model="biased softmax", experts="tp", state="zero 1 over dp", kernels="triton"
    ),
    Case(
        pp=2,
        ep=2,
        model="biased",
        experts="ep",
        schedule="zb_h1",
        microbatches=3,
        state="zero 2 over ep",
    ),
    Case(
        pp=2, dp=2, model="biased softmax", experts="dp", schedule="zbv", layers=4, microbatches=2
    ),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_three_steps_equal_one_process(case: Case, tmp_path: Path) -> None:
    compare(case, harness.load_case(case, tmp_path))


SAVED = Case(dp=2, ep=2, model="biased", experts="ep", state="zero 1 over dp, ep")
OTHER = Case(pp=2, dp=2, model="biased", experts="dp", microbatches=2, schedule="zbv", layers=2)


def _saved(module: Any, start: Any, batches: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Two steps, an evaluation between them that changes nothing, and a checkpoint."""
    mesh = Mesh(module.PLAN.mesh)
    model, state = module.build(mesh)
    harness.fill(state, start)
    for batch in batches:
        before = {key: value.clone() for key, value in harness.kept(state).items()}
        module.eval_step(model, state, harness.local_batch(module.PLAN, *batch))
        assert all(torch.equal(before[key], value) for key, value in harness.kept(state).items())
        module.train_step(model, state, harness.local_batch(module.PLAN, *batch), 0.01)
    saver.save(folder, 2, state)
    return _biases(state)


def _loaded(module: Any, folder: Path) -> dict[str, torch.Tensor]:
    _, state = module.build(Mesh(module.PLAN.mesh))
    saver.load(folder / "step-000002", state)
    return _biases(state)


def _biases(state: Any) -> dict[str, torch.Tensor]:
    return {key: x.clone() for key, x in harness.kept(state).items() if key.endswith("router_bias")}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "other", [SAVED, OTHER], ids=["the same ranks", "stages and another folding"]
)
def test_a_checkpoint_has_all_biases(other: Case, tmp_path: Path) -> None:
    start = reference.initial(SAVED.config)
    batches = list(harness.batches(SAVED, 2))
    first = harness.load_case(SAVED, tmp_path / "first")
    saved, *_ = run_ranks(4, _saved, first, start, batches, tmp_path / "saved")
    assert any(not torch.equal(saved[name], start[name]) for name in saved)
    loaded = run_ranks(4, _loaded, harness.load_case(other, tmp_path / "other"), tmp_path / "saved")
    assert {name for each in loaded for name in each} == {*saved}
    assert all(torch.equal(each[name], saved[name]) for each in loaded for name in each)


def _overflows(module: Any, start: Any, batches: Any) -> list[dict[str, torch.Tensor]]:
    """The biases after a good step, one whose gradients overflow, and another good one."""
    model, state = module.build(Mesh(module.PLAN.mesh))
    harness.fill(state, start)
    found: list[dict[str, torch.Tensor]] = []
    for batch, scale in zip(batches, (2.0**4, 2.0**60, 2.0**4), strict=True):
        harness.kept(state)["optimizer/loss_scale"].fill_(scale)
        module.train_step(model, state, harness.local_batch(module.PLAN, *batch), 0.01)
        found.append(_biases(state))
    return found


def test_a_step_with_an_overflow_moves_no_bias(tmp_path: Path) -> None:
    case = Case(dp=2, model="biased", experts="dp", precision="fp16")
    start = {name: value.float() for name, value in reference.initial(case.config).items()}
    module = harness.load_case(case, tmp_path)
    for good, skipped, last in run_ranks(
        2, _overflows, module, start, list(harness.batches(case, 3))
    ):
        assert good
        assert all(x.any() and torch.equal(x, skipped[name]) for name, x in good.items())
        assert any(not torch.equal(x, last[name]) for name, x in skipped.items())
