"""Our rows run by torch's own executor, on gloo ranks: one step gives the loss and gradients of one
process.

With the messages that torch adds to rows without any, as `scalec schedule --csv` writes them, and
with ours.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as theirs

from helpers.forked_ranks import run_ranks
from helpers.schedules.listed import listed
from scalec.compiler.schedules.actions import Schedule, Work
from scalec.compiler.schedules.activation_memory import MemoryBudget
from scalec.compiler.schedules.csv_file import csv
from scalec.compiler.schedules.p2p import with_messages
from scalec.compiler.schedules.registry import SCHEDULES, v_placement
from scalec.compiler.schedules.timeline import Times

ROWS, WIDTH = 2, 4
"""Of a microbatch."""

Numbers = dict[str, Tensor]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (2, 6), (3, 6)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_runs_ours(name: str, ranks: int, microbatches: int, tmp_path: Path):
    _runs(SCHEDULES[name](ranks, microbatches), tmp_path)


def test_torch_runs_rows_made_for_times(tmp_path: Path):
    """As `auto` has them: weights' parts where there is time, elsewhere backward in one."""
    times = Times((1, 2, 1, 3), (1, 3, 2, 1), (2, 1, 3, 1), 0.5)
    schedule = listed(v_placement(2, 2), 4, times, MemoryBudget.of_microbatches(2, 4, 4))
    assert {Work.INPUT, Work.WEIGHT, Work.BACKWARD} <= {
        action.work for _, _, action in schedule.cells()
    }
    _runs(schedule, tmp_path)


def test_another_order_is_noticed(tmp_path: Path):
    """Two messages change places where they are sent alone: torch takes each for the other."""
    right = _ordered(SCHEDULES["gpipe"](2, 4))
    text = csv(right).replace("0SEND_F2,0F3,0SEND_F3", "0F3,0SEND_F3,0SEND_F2")
    assert text != csv(right)
    with pytest.raises(AssertionError, match="compute_comms"):
        _demand_equal(right, {"compute_comms": text}, tmp_path)


def _ordered(schedule: Schedule) -> Schedule:
    return with_messages(schedule, Times.uniform(schedule.stages))


def _runs(schedule: Schedule, folder: Path) -> None:
    _demand_equal(
        schedule, {"compute_only": csv(schedule), "compute_comms": csv(_ordered(schedule))}, folder
    )


def _demand_equal(schedule: Schedule, rows: dict[str, str], folder: Path) -> None:
    """Of each file's rows, by torch's word for what they have, a step is that of one process."""
    for form, text in rows.items():
        (folder / form).write_text(text)
    expected = _one_process(schedule)
    for form, found in _joined(
        run_ranks(schedule.ranks, _steps, schedule, folder, [*rows])
    ).items():
        torch.testing.assert_close(
            found, expected, rtol=1e-12, atol=1e-12, msg=lambda why, form=form: f"{form}: {why}"
        )


def _joined(results: list[dict[str, Numbers]]) -> dict[str, Numbers]:
    """By form, what all ranks have."""
    return {
        form: {name: x for result in results for name, x in result[form].items()}
        for form in results[0]
    }


def _model(stages: int) -> list[nn.Module]:
    """Linear blocks, a stage each."""
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
        for _ in range(stages)
    ]


def _data(microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(2, microbatches * ROWS, WIDTH, dtype=torch.float64, generator=generator)
    return x, target


def _loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def _gradients(stage: int, module: nn.Module) -> Numbers:
    return {
        f"{stage}.{name}": weight.grad
        for name, weight in module.named_parameters()
        if weight.grad is not None
    }


def _one_process(schedule: Schedule) -> Numbers:
    """The loss, and each gradient by stage and name."""
    model = _model(schedule.stages)
    x, target = _data(schedule.microbatches)
    loss = _loss(nn.Sequential(*model)(x), target)
    loss.backward()  # pyright: ignore[reportUnknownMemberType]
    return {"loss": loss.detach()} | {
        k: g for i, module in enumerate(model) for k, g in _gradients(i, module).items()
    }


def _steps(schedule: Schedule, folder: Path, forms: list[str]) -> dict[str, Numbers]:
    """On one rank: a step of the rows of each file."""
    return {form: _step(schedule, folder / form, form) for form in forms}


class _Stage(PipelineStage):
    """Greets no neighbours before the first step: torch 2.11 has a rank greet itself too, to
    which gloo has no way.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []


def _step(schedule: Schedule, rows: Path, form: Any) -> Numbers:
    """The gradients that the rank has, and the loss if it has the last stage."""
    # else no gradients are sent
    example = torch.zeros(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    held = {stage: _model(schedule.stages)[stage] for stage in schedule.stages_of(dist.get_rank())}
    stages = [
        _Stage(module, stage, schedule.stages, torch.device("cpu"), (example,), (example,))
        for stage, module in held.items()
    ]
    runtime = theirs._PipelineScheduleRuntime(
        stages, schedule.microbatches, loss_fn=_loss, scale_grads=False
    )
    runtime._load_csv(str(rows), format=form)
    x, target = _data(schedule.microbatches)
    losses: list[Tensor] = []
    first, last = 0 in held, schedule.stages - 1 in held
    runtime.step(*((x,) if first else ()), target=target if last else None, losses=losses)
    loss = {"loss": torch.stack(losses).sum().detach()} if last else {}
    return loss | {
        key: gradient
        for stage, module in held.items()
        for key, gradient in _gradients(stage, module).items()
    }
