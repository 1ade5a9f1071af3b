"""A value that is not finite on one rank alone: no rank's state changes by its step, nor by
those after it.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.forked_ranks import run_ranks
from helpers.oracle import harness
from helpers.oracle.plans import Case
from scalec.runtime import Mesh

CASES = [
    Case(dp=2, tp=2, clip=0.05, optimizer="adamw", microbatches=2),
    Case(dp=2, clip=0.05, optimizer="adamw", precision="fp16", state="zero 3 over dp"),
    Case(pp=2, optimizer="momentum", microbatches=2),
]


def copy_state(state: Any) -> dict[str, Tensor]:
    return {box.key: box.tensor.clone() for box in state.boxes()}


def _planted(module: Any, batches: list[harness.Inputs]) -> list[tuple[bool, list[str]]]:
    """After each step: whether its metrics are finite, and what has changed on this rank; the
    second is spoiled.
    """
    mesh = Mesh(module.PLAN.mesh)
    model, state = module.build(mesh)
    state.initialise(0)
    found: list[tuple[bool, list[str]]] = []
    for number, batch in enumerate(batches):
        if number == 1 and all(mesh.rank(axis) == mesh.size(axis) - 1 for axis in mesh.axes):
            for own in (
                box.tensor for box in state.boxes() if "/" not in box.key and box.tensor.numel()
            ):
                own.view(-1)[0] = torch.inf
            state.refresh()
        before = copy_state(state)
        metrics = module.train_step(model, state, harness.local_batch(module.PLAN, *batch), 0.1)
        changed = [
            key for key, value in copy_state(state).items() if not torch.equal(value, before[key])
        ]
        found.append((bool(metrics.loss.isfinite() & metrics.norm.isfinite()), changed))
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_changes_on_any_rank(case: Case, tmp_path: Path) -> None:
    batches = [next(harness.batches(case, 1))] * 3
    for first, second, third in run_ranks(
        case.ranks, _planted, harness.load_case(case, tmp_path), batches
    ):
        assert first[0]
        assert first[1]
        assert second == third == (False, [])
