"""Planted mistakes on one rank: copies that differ, a step that differs from itself, a value
that is no number.
"""

from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.forked_ranks import run_ranks
from helpers.oracle import harness
from helpers.oracle.plans import Case
from helpers.small_log import small_log
from scalec.runtime import Mesh, Watch
from scalec.runtime.errors import RunError
from scalec.runtime.train.watching import Watching

CASES = [
    Case(dp=2, tp=2, sp=True, clip=0.05, optimizer="adamw", state="zero 3 over dp"),
    Case(dp=2, clip=0.05, optimizer="adamw", precision="bf16"),
    Case(pp=2, dp=2, optimizer="momentum", microbatches=2),
]
Plant = Callable[[Any, Any], None]
"""Spoils something on one rank, given its model and state."""


def _watched(module: Any, batch: harness.Inputs, asked: Watch, plant: Plant, rank: int) -> str:
    """What a rank is told in three steps, before the second of which something is planted on
    one rank.
    """
    mesh = Mesh(module.PLAN.mesh)
    model, state = module.build(mesh)
    state.initialise(0)
    local = harness.local_batch(module.PLAN, *batch)
    inputs = module.PLAN.inputs
    watching = Watching(
        asked, model, state, module.train_step, lambda _: local, small_log(None), inputs
    )
    try:
        for number in (1, 2, 3):
            if number == 2 and torch.distributed.get_rank() == rank:
                plant(model, state)
            watching.after(
                number, watching.step(number, local, 0.1, module.train_step, lambda: None)
            )
    except RunError as error:
        return str(error)
    return ""


def _nothing(model: Any, state: Any) -> None:
    """A healthy rank."""


def _flip(x: Tensor) -> None:
    """The lowest bit of the first element."""
    x.view(-1)[:1].view(torch.int16 if x.element_size() == 2 else torch.int32).bitwise_xor_(1)


def _flip_state(what: str, model: Any, state: Any) -> None:
    copies = [each for each in state.copies() if each.axis.size > 1]
    _flip(next(each.tensor for each in copies if each.prefix.startswith(what)))


def _flip_gradient(model: Any, state: Any) -> None:
    copies = [each for each in state.copies() if each.axis.size > 1 and each.role == "gradient"]
    state.looks.insert(0, lambda: _flip(copies[0].tensor))


def _noise(model: Any, state: Any) -> None:
    """Gradients that are other ones each time."""
    numbers = count(1)

    def add() -> None:
        for flat in state.gradients().values():
            for each in flat if isinstance(flat, list) else [flat]:
                each.view(-1)[0] += next(numbers)

    state.looks.insert(0, add)


def get_reports(case: Case, folder: Path, asked: Watch, plant: Plant) -> set[str]:
    batch = next(harness.batches(case, 1))
    return {
        *run_ranks(
            case.ranks,
            _watched,
            harness.load_case(case, folder),
            batch,
            asked,
            plant,
            case.ranks - 1,
        )
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "case", [*CASES, pytest.param(Case(dp=2, model="biased"), marks=pytest.mark.long)], ids=str
)
def test_a_healthy_run_is_told_nothing(case: Case, tmp_path: Path) -> None:
    assert get_reports(case, tmp_path, Watch(copies=1, replay=2, spikes=5.0), _nothing) == {""}


PLANTS = {
    "parameter": (partial(_flip_state, ""), "step 2: "),
    "gradient": (_flip_gradient, "step 2: the gradient of "),
}


@pytest.mark.parametrize("what", PLANTS)
@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_one_bit_of_a_copy_is_found(case: Case, what: str, tmp_path: Path) -> None:
    plant, words = PLANTS[what]
    (told,) = get_reports(case, tmp_path, Watch(copies=1), plant)
    assert told.startswith(words)
    assert " is not the same over " in told
    assert (
        f"rank {case.ranks - 1}" in told
        or f"and {case.ranks - 1} " in told
        or f", {case.ranks - 1} " in told
    )


def test_a_step_that_is_not_itself_is_found(tmp_path: Path) -> None:
    (told,) = get_reports(CASES[1], tmp_path, Watch(replay=2), _noise)
    assert told.startswith("step 2: run twice, rank 1 on ")
    assert "has another gradient of bucket `" in told


def _spoil(model: Any, *given: Any) -> None:
    """The second layer's result is no number."""
    layer = next(module for name, module in model.named_modules() if name.endswith("layers.1"))
    forward = layer.forward
    layer.forward = lambda x, *others: forward(x * torch.nan, *others)


@pytest.mark.parametrize("case", CASES[1:], ids=str)
def test_the_first_value_is_named(case: Case, tmp_path: Path) -> None:
    (told,) = get_reports(case, tmp_path, Watch(locate=True), _spoil)
    assert told.startswith(
        "step 2: loss nan, gradient norm nan; no parameter has been updated by it"
    )
    assert "first value not finite: " in told
    assert "layers.1, microbatch 1, at tiny.scale:" in told
    assert told.endswith(f"rank {case.ranks - 1}")
