"""Models of every shape in stages of torch.distributed.pipelining against the runtime's whole
models, in float64.

Non-goals: schedules and sharded state (`test_torch_target`).
"""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from end_to_end.test_numbers import assert_steps_equal
from end_to_end.test_stages import (
    CASES,
    LR,
    MODELS,
    STAGED,
    WHOLE,
    batches_of,
    module_of,
    plan_of,
)
from helpers import torch_target, uneven_stages
from helpers.forked_ranks import run_ranks
from helpers.oracle import harness, reference
from helpers.oracle.plans import SEQ, Case, plan_text
from helpers.oracle.reference import Tensors, random_parameters
from scalec.codegen_templates import torch_ops

REFUSED = {"dropped", "dropped, one whole"}
"""Those with dropout."""
UNREAD = {"captured", "read by layers alone"}
"""Those whose last stage does not read all that it receives."""


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED])
def test_stages_do_what_the_whole_does(name: str, tmp_path: Path) -> None:
    cut, schedule, options = CASES[name]
    whole, staged = plan_of(MODELS[name]), plan_of(MODELS[name], cut, schedule, options)
    _same_steps(whole, staged, STAGED, [*batches_of(name)], tmp_path, name not in UNREAD)


@pytest.mark.long
@pytest.mark.parametrize("schedule", [uneven_stages.CHUNKS, "zbv  stages = [2, 2, 2, 1]"])
def test_other_placements_at_other_cuts(schedule: str, tmp_path: Path) -> None:
    whole, staged = (
        uneven_stages.unlike(case=uneven_stages.WHOLE),
        uneven_stages.unlike(schedule, "recompute = full"),
    )
    ids = torch.arange(SEQ) // torch.tensor([3, 5, 8, 2] * (uneven_stages.WHOLE.rows // 4))[:, None]
    batches = [(*inputs, ids) for inputs in harness.batches(WHOLE, 2)]
    _same_steps(whole, staged, uneven_stages.STAGED, batches, tmp_path)


def _same_steps(
    whole: str,
    staged: str,
    case: Case,
    batches: Sequence[tuple[Tensor, ...]],
    folder: Path,
    is_read: bool = True,
) -> None:
    module = module_of(whole, folder / "whole")
    start = random_parameters(harness.initial(WHOLE, module, seed=5), 1 / 4)
    steps = torch_target.run(
        case.ranks,
        torch_target.load_torch_program(staged, folder / "staged"),
        start,
        batches,
        LR,
        is_read,
    )
    assert_steps_equal(steps, harness.run(WHOLE, module, start, batches, LR))


SHARDED = Case(
    pp=2,
    dp=2,
    schedule="interleaved_1f1b(chunks=2)",
    layers=4,
    microbatches=4,
    model="tied",
    optimizer="adamw",
    state="zero 1 over dp",
)
ONE = Case(layers=4, microbatches=8, model="tied", optimizer="adamw")


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "then"), [(SHARDED, ONE), (ONE, SHARDED)], ids=["to one", "to stages"]
)
def test_a_run_goes_on_in_other_stages(first: Case, then: Case, tmp_path: Path) -> None:
    """From a checkpoint of torch's own."""
    start, batches = reference.initial(first.config), [*harness.batches(first, 3)]
    programs = [
        torch_target.load_torch_program(plan_text(case), tmp_path / str(number))
        for number, case in enumerate((first, then))
    ]
    whole = run_ranks(first.ranks, _losses, programs[0], start, batches, str(tmp_path / "saved"))[0]
    rest = run_ranks(then.ranks, _losses, programs[1], None, batches[2:], str(tmp_path / "saved"))[
        0
    ]
    assert rest == pytest.approx(whole[2:], rel=1e-10)


def _losses(
    program: ModuleType, start: Tensors | None, batches: Sequence[tuple[Tensor, ...]], saved: str
) -> Any:
    """Losses and norms of steps, from `start` and saved after the second, or from what was
    saved.
    """
    torch.set_deterministic_debug_mode("default")
    mesh = torch_target.mesh_of(program)
    model, optimizer = program.build(mesh)
    if start is None:
        torch_ops.load_checkpoint(model, optimizer, saved)
    else:
        torch_target.fill(model, start)
    found: list[complex] = []
    for number, batch in enumerate(batches):
        metrics = program.train_step(model, optimizer, program.microbatches(mesh, *batch), LR)
        found.append(complex(metrics.loss, metrics.norm))
        if start is not None and number == 1:
            torch_ops.save_checkpoint(model, optimizer, saved)
    return found
