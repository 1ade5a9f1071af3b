"""A small model in stages, written by hand as programs are, and its rows under every schedule.

Purpose: the same model on the ranks of a pipeline and, as the reference, on one.  Three values
cross from stage to stage: one that is not contiguous, one of integers, and one that the last stage
does not use.  Non-goals: what is asserted of it (`tests/runtime/pipeline/test_executor.py`).
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from scalec.compiler.schedules.actions import Schedule, ScheduleError
from scalec.compiler.schedules.csv_file import csv, groups_csv
from scalec.compiler.schedules.p2p import with_messages
from scalec.compiler.schedules.registry import SCHEDULES
from scalec.compiler.schedules.timeline import Times
from scalec.runtime import Batch, Pipeline, StageInput, split_embedding, split_linear

VOCAB, WIDTH, ROWS, SEQ = 11, 6, 2, 5
CARRIED = (
    StageInput("x", (ROWS, SEQ, WIDTH), torch.float64),
    StageInput("ids", (ROWS, SEQ), torch.int64, gradient=False),
    StageInput("skip", (ROWS, WIDTH), torch.float64),
)
SHARE = torch.tensor(1 / 7, dtype=torch.float64)


def _nothing(stage: int) -> None:
    pass


class Stage(nn.Module):
    """Embedding in the first; x + tanh(x w₁ᵀ) w₂ᵀ, which reads what all stages are given; head
    and loss in the last.
    """

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        self.is_first, self.is_last = stage == 0, stage == stages - 1

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator))

        self.w1, self.w2, self.scale = (
            weight(2 * WIDTH, WIDTH),
            weight(WIDTH, 2 * WIDTH),
            weight(WIDTH),
        )
        if self.is_first:
            self.wte, self.memory = weight(VOCAB, WIDTH), weight(VOCAB, WIDTH)
        if self.is_last:
            self.head = weight(VOCAB, WIDTH)
        for parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)  # in place of a view of a bucket

    def forward(
        self, given: tuple[Tensor, ...] | None, tokens: Tensor, labels: Tensor
    ) -> Tensor | tuple[Tensor, ...]:
        """The three values, or the loss."""
        if given is None:
            assert self.is_first
            x, odd, memory = (
                split_embedding(tokens, self.wte),
                tokens % 2,
                split_embedding(tokens[:, 0], self.memory),
            )
        else:
            x, odd, memory = given
        x = x + split_linear(
            torch.tanh(split_linear(x * self.scale, self.w1)), self.w2
        ) * odd.unsqueeze(-1)
        if self.is_last:
            logits = split_linear(x, self.head).flatten(0, -2)
            return nn.functional.cross_entropy(
                logits, labels.flatten(), ignore_index=-1, reduction="sum"
            )
        x = x + memory.unsqueeze(1)
        return x.transpose(0, 1).contiguous().transpose(0, 1), odd, memory * 1.5


class Model(nn.Module):
    """Some of the stages; `begins` is told of each call."""

    def __init__(
        self, held: Iterable[int], stages: int, begins: Callable[[int], None] = _nothing
    ) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({str(stage): Stage(stage, stages) for stage in held})
        self.begins = begins

    def forward(
        self, stage: int, given: tuple[Tensor, ...] | None, tokens: Tensor, labels: Tensor
    ) -> Tensor | tuple[Tensor, ...]:
        """One stage."""
        self.begins(stage)
        return self.stages[str(stage)](given, tokens, labels)

    def gradients(self) -> dict[str, Tensor]:
        """By name."""
        return {
            name: parameter.grad.clone()
            for name, parameter in self.named_parameters()
            if parameter.grad is not None
        }


def data(seed: int, microbatches: int) -> Batch:
    """One step's; some labels do not count."""
    generator = torch.Generator().manual_seed(100 + seed)
    shape = (microbatches, ROWS, SEQ)
    tokens = torch.randint(0, VOCAB, shape, generator=generator)
    return Batch(tokens, torch.randint(-1, VOCAB, shape, generator=generator).clamp(min=-1))


def whole(stages: int, steps: Iterable[Batch]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """On one rank, with autograd alone: the losses, and the gradients of all steps together."""
    model, losses = Model(range(stages), stages), list[Tensor]()
    for batch in steps:
        losses.append(torch.zeros((), dtype=torch.float64))
        for tokens, labels in batch.microbatches():
            made = model(0, None, tokens, labels)
            for stage in range(1, stages):
                made = model(stage, made, tokens, labels)
            (made * SHARE).backward()
            losses[-1] += made.detach()
    return losses, model.gradients()


def schedules(ranks: int, microbatches: Iterable[int]) -> Iterator[tuple[str, Schedule]]:
    """Every schedule that there is for these numbers, with its messages."""
    for name, made in SCHEDULES.items():
        for number in microbatches:
            try:
                schedule = made(ranks, number)
            except ScheduleError:
                continue
            yield name, with_messages(schedule, Times.uniform(schedule.stages, comm=0.1))


def pipeline(schedule: Schedule) -> Pipeline:
    """As a program has it."""
    rows, groups = csv(schedule).splitlines(), groups_csv(schedule).splitlines()
    return Pipeline("pp", schedule.stage_to_rank, CARRIED, rows, groups)
