"""Emitted programs inside loops of one's own: the examples, on forked ranks."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from helpers.forked_ranks import run_ranks
from helpers.oracle import harness
from helpers.oracle.plans import Case, plan_text
from helpers.torch_target import load_torch_program

EXAMPLES = Path(__file__).parents[1] / "examples"
TEXT = bytes(range(32)) * 64
CASE = Case(dp=2, tp=1, microbatches=2, precision="fp32", optimizer="adamw")


def _example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_torch_data_loader_feeds_a_program(tmp_path: Path) -> None:
    losses = run_ranks(
        2, _example("torch_data_loader").train, harness.load_case(CASE, tmp_path), TEXT, 6
    )
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def test_a_loop_goes_on_from_a_checkpoint_of_torch_on_another_mesh(tmp_path: Path) -> None:
    """By ZeRO on two ranks, then on one: the losses are those of steps without a stop."""
    cases = replace(CASE, microbatches=1, state="zero 3 over dp"), replace(CASE, dp=1)
    programs = [harness.load_case(each, tmp_path / f"{each}") for each in cases]
    train = _example("own_loop").train
    begun = run_ranks(2, train, programs[0], tmp_path / "saved", 2, functional=True)[0]
    more = run_ranks(1, train, programs[1], tmp_path / "saved", 5, functional=True)[0]
    whole = run_ranks(2, train, programs[0], tmp_path / "other", 5, functional=True)[0]
    assert len(begun) == 2
    assert [*begun, *more] == pytest.approx(whole, rel=1e-5)
    assert whole[-1] < whole[0]


def test_a_trainer_has_callbacks_and_an_optimizer_of_its_own(tmp_path: Path) -> None:
    (first, stopped), (second, _) = run_ranks(
        2, _trained, load_torch_program(plan_text(CASE), tmp_path), functional=True
    )
    assert first == second
    assert first[-1] < first[0]
    assert stopped == len(first) == 5


def _trained(program: ModuleType) -> tuple[list[float], int]:
    trainer = _example("trainer")
    losses: list[float] = []

    class Stop(trainer.Callback):
        def on_step_end(self, trainer: Any, progress: Any) -> None:
            losses.append(progress.loss)
            progress.stop = progress.step == 5

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    it = trainer.Trainer(program, mesh, trainer.with_momentum, [Stop()])
    return losses, it.train(trainer.random_rows(program, TEXT), 20).step
