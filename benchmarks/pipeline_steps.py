"""`.venv/bin/python benchmarks/pipeline_steps.py`: steps of a pipeline beside torch's own
schedules.

Stages of a few linear layers with residuals on 2 gloo ranks: our executor and
torch.distributed.pipelining do the same schedule, of the same microbatches, and come to the same
gradients.  Host time is of rank 0; wall time of both ranks, which begin together.  In schedules of
zero bubble backward is in two parts: ours puts off the products of weights' gradients, torch's
splits the graph of autograd.

Non-goals: what an action costs where a stage does nothing, and bubbles (`pipelines.py`).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from measure import asked_quick, where
from pipelines import our_step
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.functional import linear, silu
from two_ranks import RANKS, Comparison, Step, compare

from scalec.compiler.schedules.actions import Schedule
from scalec.compiler.schedules.registry import SCHEDULES
from scalec.runtime import Batch, Mesh, split_linear

WIDTH, ROWS, LAYERS, MICROBATCHES = 128, 64, 3, 8
TORCHS = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
PORT = 29475


class Block(nn.Module):
    """A stage; `splits` where its weights' gradients can be put off by our executor."""

    def __init__(self, number: int, splits: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.weights = nn.ParameterList(
            torch.randn(WIDTH, WIDTH, generator=generator) * WIDTH**-0.5 for _ in range(LAYERS)
        )
        self._product = split_linear if splits else linear
        self.clear()

    def clear(self) -> None:
        """Sets the gradients to zero."""
        for weight in self.weights:
            weight.grad = torch.zeros_like(weight)

    def forward(self, x: Tensor) -> Tensor:
        """Layers with residuals."""
        for weight in self.weights:
            x = x + silu(self._product(x, weight))
        return x


def main() -> None:
    quick = asked_quick(__doc__)
    print(f"{where()}, {RANKS} gloo ranks, one thread each")
    size = f"{MICROBATCHES} microbatches of {ROWS} × {WIDTH}, stages of {LAYERS} layers"
    comparisons = [Comparison(f"{name}: {size}", partial(_steps, name), "torch") for name in TORCHS]
    compare(comparisons, 2 if quick else 20, PORT)


def _steps(name: str, rank: int) -> Mapping[str, Step]:
    schedule = SCHEDULES[name](RANKS, MICROBATCHES)
    x = torch.randn(MICROBATCHES, ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    return {"ours": _ours(schedule, rank, x), "torch": _torchs(name, schedule, rank, x)}


def _ours(schedule: Schedule, rank: int, x: Tensor) -> Step:
    blocks = [Block(number, splits=True) for number in schedule.stages_of(rank)]
    following = iter(blocks)
    batch = Batch(tokens=x, labels=x)
    run = our_step(schedule, Mesh({"pp": RANKS}), lambda: next(following), batch, (ROWS, WIDTH))

    def step() -> tuple[Tensor, ...]:
        for block in blocks:
            block.clear()
        run()
        return _gradients(blocks)

    return step


def _torchs(name: str, schedule: Schedule, rank: int, x: Tensor) -> Step:
    held = schedule.stages_of(rank)
    blocks = [Block(number, splits=False) for number in held]
    example = torch.zeros(ROWS, WIDTH, requires_grad=True)  # else no gradients are sent
    stages = [
        PipelineStage(
            block,
            number,
            schedule.stages,
            torch.device("cpu"),
            (example,),
            example,
            group=dist.group.WORLD,
        )
        for number, block in zip(held, blocks, strict=True)
    ]
    own: Any = stages if len(held) > 1 else stages[0]
    made: Any = TORCHS[name](own, schedule.microbatches, loss_fn=_summed, scale_grads=False)
    rows = x.flatten(0, 1)

    def step() -> tuple[Tensor, ...]:
        for block in blocks:
            block.clear()
        arguments = (rows,) if 0 in held else ()
        target = {"target": rows} if schedule.stages - 1 in held else {}
        made.step(*arguments, **target)
        return _gradients(blocks)

    return step


def _summed(x: Tensor, _: Tensor) -> Tensor:
    return x.sum()


def _gradients(blocks: list[Block]) -> tuple[Tensor, ...]:
    found = [weight.grad for block in blocks for weight in block.weights]
    return tuple(gradient.clone() for gradient in found if gradient is not None)


if __name__ == "__main__":
    main()
