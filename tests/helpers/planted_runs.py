"""Emitted programs with a defect, run: on gloo ranks, sanitized, or recorded on groups that
only pretend.
"""

import shutil
from math import prod
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from helpers.edited_text import replace_once
from helpers.forked_ranks import plain_groups, run_ranks
from helpers.oracle import harness, reference
from helpers.oracle.plans import Case, plan_text
from helpers.oracle.reference import Step
from helpers.planted_defects import Edits
from helpers.programs import import_module, write_program
from scalec.compiler.proof.recorded import Recorded, compare
from scalec.runtime import Mesh
from scalec.runtime.debug.record import Recorder
from scalec.runtime.debug.sanitize import Sanitizer, observe

LR = 0.01


def planted(case: Case, folder: Path, edits: Edits) -> ModuleType:
    """The emitted program of a case with the defect."""
    path = write_program(plan_text(case), folder) / "train.py"
    path.write_text(replace_once(path.read_text(), edits))
    return import_module(path)


def first_step(case: Case, module: ModuleType) -> Step:
    """The program's results of the first step of its batches.

    Fails where copies on two ranks differ.
    """
    return harness.run(
        case, module, reference.initial(case.config), [*harness.batches(case, 1)], LR
    )[0]


def right_step(case: Case) -> Step:
    """The same step in one process, by plain torch."""
    start = reference.initial(case.config)
    return reference.run(case.config, case.training, start, [*harness.batches(case, 1)], LR)[0]


def wrong_gradients(got: Step, right: Step) -> set[str]:
    """The parameters whose gradients differ."""
    pairs = ((name, got.gradients[name], gradient) for name, gradient in right.gradients.items())
    # nor NaN
    return {name for name, x, y in pairs if not (x - y).abs().max() <= 1e-10 * y.abs().max()}


def sanitizer(case: Case, module: ModuleType) -> str:
    """The line by which a sanitized run of one step ends."""
    with pytest.raises(pytest.fail.Exception) as failed:
        run_ranks(case.ranks, _sanitized, case, module)
    return (
        str(failed.value).strip().splitlines()[-1].removeprefix("scalec.runtime.errors.RunError: ")
    )


def _sanitized(case: Case, module: ModuleType) -> None:
    mesh = Mesh(module.PLAN.mesh, watch=Sanitizer(torch.device("cpu")))
    model, state = module.build(mesh)
    harness.fill(state, reference.initial(case.config))
    (rows,) = harness.batches(case, 1)
    step = observe(module.train_step, mesh, module.PLAN.inputs, "step", 0)
    step(model, state, harness.local_batch(module.PLAN, *rows), LR)


def record(module: ModuleType, folder: Path, mesh: dict[str, int] | None = None) -> Recorded:
    """The calls of each rank in a step, one after another on groups that pretend, against the plan
    in `folder`.

    `mesh` is what the ranks build instead of the plan's.
    """
    world = prod(module.PLAN.mesh.values())
    with plain_groups():
        for rank in range(world):
            dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
            try:
                _pretend(module, folder / "recorded", mesh or module.PLAN.mesh)
            finally:
                dist.destroy_process_group()
    shutil.copy(folder / "plan.json", folder / "recorded")
    return compare(folder / "recorded")


def _pretend(module: ModuleType, folder: Path, mesh: dict[str, int]) -> None:
    plan = module.PLAN
    model, state = module.build(Mesh(mesh))
    state.initialise(0)
    rows = torch.zeros(plan.global_batch, plan.seq, dtype=torch.int64)
    with Recorder(folder, plan, 0) as recorder:
        recorder.of("train", module.train_step)(
            model, state, harness.local_batch(plan, rows, rows), LR
        )
