"""torchrun --standalone --nproc-per-node=4 examples/trainer.py out/tiny_llama_dtensor 20

A plan compiled with `--target dtensor` inside a trainer with callbacks, as in Hugging Face's, and
with an optimizer of your own.  Nothing here but torch: parameters and inputs are DTensors.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh


@dataclass
class Progress:
    """Where a run is: the steps done, the last loss, and whether a callback has ended it."""

    step: int = 0
    loss: float = float("nan")
    stop: bool = False


class Callback:
    """Called by the trainer; each method may be replaced."""

    def on_step_end(self, trainer: "Trainer", progress: Progress) -> None:
        """After each update."""

    def on_train_end(self, trainer: "Trainer", progress: Progress) -> None:
        """After the last one."""


@dataclass
class Trainer:
    """Trains the model of a program on rows of tokens, [global batch, seq + 1] a step."""

    program: ModuleType
    mesh: Any
    optimizer_of: Any = None
    """Makes an optimizer of the model, in place of the plan's."""
    callbacks: Sequence[Callback] = ()
    progress: Progress = field(default_factory=Progress)

    def train(self, rows: Iterable[Tensor], steps: int) -> Progress:
        """Steps until the rows or the steps end, or a callback ends them."""
        model, optimizer = self.program.build(self.mesh)
        optimizer = self.optimizer_of(model) if self.optimizer_of else optimizer
        for each in rows:
            if self.progress.step == steps or self.progress.stop:
                break
            batch = self.program.microbatches(self.mesh, each[:, :-1], each[:, 1:])
            lr = self.program.learning_rate(self.progress.step, steps)
            metrics = self.program.train_step(model, optimizer, batch, lr)
            self.progress.step, self.progress.loss = self.progress.step + 1, float(metrics.loss)
            for callback in self.callbacks:
                callback.on_step_end(self, self.progress)
        for callback in self.callbacks:
            callback.on_train_end(self, self.progress)
        return self.progress


class Log(Callback):
    """Prints each loss, on one rank."""

    def on_step_end(self, trainer: Trainer, progress: Progress) -> None:
        """A line."""
        if dist.get_rank() == 0:
            print(f"step {progress.step}  loss {progress.loss:.4f}", flush=True)


def random_rows(program: ModuleType, text: bytes, seed: int = 0) -> Iterable[Tensor]:
    """Windows of a text's bytes, the same on all ranks."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    while True:
        begins = torch.randint(
            len(tokens) - program.SEQ, (program.GLOBAL_BATCH, 1), generator=generator
        )
        yield tokens[begins + torch.arange(program.SEQ + 1)]


def with_momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimizer that no plan has."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    program = import_module("train")
    mesh = init_device_mesh("cpu", tuple(program.MESH.values()), mesh_dim_names=tuple(program.MESH))
    trainer = Trainer(program, mesh, with_momentum, [Log()])
    trainer.train(random_rows(program, Path(__file__).read_bytes()), int(sys.argv[2]))
    dist.destroy_process_group()
