"""Models of every shape in stages of torch.distributed.pipelining against the runtime's whole models, in float64.

Non-goals: schedules and sharded state (`test_torch_target`).
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from end_to_end.test_numbers import assert_steps_equal
from end_to_end.test_stages import CASES, LR, MODELS, STAGED, WHOLE, batches_of, drawn, module_of, plan_of
from helpers import torch_target, uneven_stages
from helpers.oracle import harness
from helpers.oracle.plans import SEQ, Case

REFUSED = {"dropped", "dropped, one whole", "ops between"}
"""Those with dropout, or with values that backward recomputes one by one."""


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED])
def test_stages_do_what_the_whole_does(name: str, tmp_path: Path) -> None:
    cut, schedule, options = CASES[name]
    _same_steps(
        plan_of(MODELS[name]), plan_of(MODELS[name], cut, schedule, options), STAGED, [*batches_of(name)], tmp_path
    )


@pytest.mark.long
@pytest.mark.parametrize("schedule", [uneven_stages.CHUNKS, "zbv  stages = [2, 2, 2, 1]"])
def test_other_placements_at_other_cuts(schedule: str, tmp_path: Path) -> None:
    whole, staged = uneven_stages.unlike(case=uneven_stages.WHOLE), uneven_stages.unlike(schedule, "recompute = full")
    ids = torch.arange(SEQ) // torch.tensor([3, 5, 8, 2] * (uneven_stages.WHOLE.rows // 4))[:, None]
    batches = [(*inputs, ids) for inputs in harness.batches(WHOLE, 2)]
    _same_steps(whole, staged, uneven_stages.STAGED, batches, tmp_path)


def _same_steps(whole: str, staged: str, case: Case, batches: Sequence[tuple[Tensor, ...]], folder: Path) -> None:
    module = module_of(whole, folder / "whole")
    start = drawn(harness.initial(WHOLE, module, seed=5))
    steps = torch_target.run(case.ranks, torch_target.compiled(staged, folder / "staged"), start, batches, LR)
    assert_steps_equal(steps, harness.run(WHOLE, module, start, batches, LR))
